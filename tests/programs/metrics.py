"""DDP's tutorial with torchmetrics: a sampler with set_epoch, and metrics that gather over the ranks."""

import argparse

import torch
import torch.distributed as dist
import torchmetrics
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()

dist.init_process_group()
torch.manual_seed(8)
data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(50)]
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
metrics = torchmetrics.MetricCollection(
    {
        "mean": torchmetrics.aggregation.MeanMetric(),
    }
)
right = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.update(loss.detach())
        right.update(logits, y)
    losses += [metrics.compute()["mean"].item(), right.compute().item()]
    metrics.reset()
    right.reset()
if dist.get_rank() == 0:
    with open(args.losses, "w") as file:
        file.write(repr(losses))
dist.destroy_process_group()
