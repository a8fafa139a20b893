"""FSDP2 by fully_shard on a DeviceMesh, and torch.distributed.checkpoint: save, load and continue."""

import argparse
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()


def main():
    dist.init_process_group("cpu:gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(rank), []

    def train(steps):
        for _ in range(steps):
            x = torch.randn(8, 16, generator=generator)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item())

    train(3)
    weights, state = get_state_dict(model, optimizer)
    folder = args.losses + ".checkpoint"
    saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    saving.result()
    drawn = generator.get_state()
    train(2)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    generator.set_state(drawn)
    train(2)
    assert losses[3:5] == losses[5:7], losses
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
        with open(args.losses, "w") as file:
            file.write(repr(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
