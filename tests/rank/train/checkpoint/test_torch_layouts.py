"""Test that checkpoints of FSDP2 and torchtitan continue in nbkit, and nbkit's continue there, with equal losses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import TornCheckpoint
from nbkit.rank.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("known_to_be_right")

ROWS, BATCH, STEPS = 24, 8, 3


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    made.register_buffer("seen", torch.ones(2))
    return made


def in_two_groups(made: nn.Module) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in made.parameters() if (p.ndim > 1) == two] for two in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.03}], lr=0.01)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(5, generator=draw).double(), torch.randn(3, generator=draw).double()) for _ in range(ROWS)]


def flat() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


class Plain:
    """A training in plain FSDP2, without nbkit."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard  # an import at the top would cost each worker a second

        torch.manual_seed(3)
        self.model = model()
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = in_two_groups(self.model)

    def steps(self, first: int, stop: int) -> list[float]:
        losses = []
        for step in range(first, stop):
            own = [data()[(step * BATCH + row) % ROWS] for row in range(dist.get_rank(), BATCH, dist.get_world_size())]
            inputs, targets = (torch.stack(each) for each in zip(*own, strict=True))
            loss = F.mse_loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            losses.append(float(mean))
        return losses

    def state(self, layout: str) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict as of_torch

        if layout == "fsdp2":
            weights, optimizer = of_torch.get_state_dict(self.model, self.optimizer)
            return {"model": weights, "optim": optimizer}
        weights = of_torch.get_model_state_dict(self.model)
        optimizer = of_torch.get_optimizer_state_dict(self.model, self.optimizer, options=flat())
        return {**weights, "optimizer": optimizer, "train_state": {"step": torch.tensor(STEPS)}}

    def load(self, path: Path, layout: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as of_torch

        state = self.state(layout)
        dcp.load(state, checkpoint_id=path)
        names = {"fsdp2": ("model", "optim"), "torchtitan": ("", "optimizer")}[layout]
        optimizer = state.pop(names[1])
        state.pop("train_state", None)
        weights = state["model"] if names[0] else state
        options = None if layout == "fsdp2" else flat()
        of_torch.set_model_state_dict(self.model, weights)
        of_torch.set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)


def trainer(strategy: str) -> Trainer:
    return Trainer(
        model=model, loss=F.mse_loss, optimizer=in_two_groups, data=data(), batch_size=BATCH,
        loading=nbkit.Loading(shuffle=False), strategy=strategy, log_dir=None, progress=False,
    )  # fmt: skip


def there_and_back(world: Any, folder: Path) -> dict[str, list[float]]:
    """Return the losses of the steps after STEPS, by the kind of training that made them."""
    import torch.distributed.checkpoint as dcp

    from nbkit.rank.train.checkpoint.torch_layouts import convert

    plain = Plain()
    plain.steps(0, STEPS)
    for layout in ("fsdp2", "torchtitan"):
        dcp.save(plain.state(layout), checkpoint_id=folder / layout)
    found = {"plain": plain.steps(STEPS, 2 * STEPS)}
    for layout, strategy in (("fsdp2", "zero3"), ("torchtitan", "ddp")):
        ours = trainer(strategy)
        ours.load(folder / layout)
        if layout == "fsdp2":
            ours.save(folder / "ours")
        ours.fit(STEPS)
        found[f"ours from {layout}"] = [record["loss"] for record in ours.history]
    for layout in ("fsdp2", "torchtitan"):
        if dist.get_rank() == 0:
            convert(folder / "ours", folder / f"back to {layout}", layout)
        dist.barrier()
        other = Plain()
        other.steps(0, 1)  # gives the optimizer its own state
        other.load(folder / f"back to {layout}", layout)
        found[f"plain from ours, {layout}"] = other.steps(STEPS, 2 * STEPS)
    return found


def hostile(world: Any, folder: Path) -> str:
    with pytest.raises(TornCheckpoint) as caught:
        trainer("ddp").load(folder)
    return str(caught.value.numbers)


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_losses_continue_equally_between_fsdp2_torchtitan_and_nbkit(tmp_path: Path) -> None:
    found, _ = run_ranks(there_and_back, 2, tmp_path)

    assert len(found) == 5
    plain = torch.tensor(found.pop("plain"), dtype=torch.float64)
    for losses in found.values():
        assert torch.allclose(torch.tensor(losses, dtype=torch.float64), plain, rtol=1e-10, atol=0)


def test_metadata_that_names_a_function_is_refused_and_not_run(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))

    (why,) = run_ranks(hostile, 1, tmp_path)

    assert "builtins.print" in why
    assert "run" not in capfd.readouterr().out.split()
