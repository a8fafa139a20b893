"""The cell that ranks run before a test trains: it defines a small network, its rows, and how a Trainer is made.

The network has float64 weights and dropout: two trainings are equal if their losses agree to 1e-10. A test adds a cell
of its own; `defaults` are the other options of its trainings, `slow` are seconds that a step also waits.
"""

NETWORK = """
import time
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
slow, defaults = 0.02, {}

class Net(nn.Module):
    def __init__(self, width=16, buffer=0):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 1)
        if buffer:
            self.register_buffer("seen", torch.zeros(buffer))

    def forward(self, x):
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.1, self.training))

def rows():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [(x[i], x[i].sum().tanh().reshape(1)) for i in range(64)]

def pace(trainer, record):
    time.sleep(slow)

def make(**options):
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = dict(model=Net, loss=F.mse_loss, optimizer=optimizer, data=rows(), batch_size=8)
    settings |= dict(callbacks=[pace], progress=False, log_dir=None)
    return nbkit.Trainer(**{**settings, **defaults, **options})
"""
