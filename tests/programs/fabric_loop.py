"""A loop with Lightning's Fabric: launch, setup, backward, clip_gradients, all_reduce."""

import argparse

import lightning
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()


def train(fabric):
    fabric.seed_everything(6)
    data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(48)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    losses = []
    for number, (x, y) in enumerate(loader):
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    if fabric.is_global_zero:
        with open(args.losses, "w") as file:
            file.write(repr(losses))


fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=args.strategy)
fabric.launch(train)
