"""A program for torchrun, which does not use nbkit. The selftest runs it unchanged in a cell."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def main() -> tuple[bool, list[float]]:
    """Train a small model, save it on the first rank of each host, and return (whether this rank saved, losses)."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
            raise SystemExit(f"{torch.cuda.device_count()} GPUs are not one for each rank")
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4).to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(4 * dist.get_world_size(), 8)[dist.get_rank() :: dist.get_world_size()].to(device)
    losses = []
    for _ in range(STEPS):
        loss = model(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(float(mean))
    dist.destroy_process_group()
    return local_rank == 0, losses


if __name__ == "__main__":
    saved, losses = main()
