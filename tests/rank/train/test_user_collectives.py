"""Test that models and losses with their own collectives equal one process or are refused, and no analysis hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.nn import functional as over_ranks
from torch.nn import functional as F

STEPS = 4


class Counts(nn.Module):
    """A model that counts its classes over all ranks, in an integer buffer that weights them."""

    def __init__(self, summed: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.summed = nn.Linear(6, 6), nn.Linear(6, 3), summed
        self.register_buffer("counts", torch.ones(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(self.body(x).tanh())
        with torch.no_grad():
            now = torch.bincount(found.argmax(-1), minlength=3)
            if self.summed:
                dist.all_reduce(now)
        weights = 1 / self.counts.float()
        if self.training:
            self.counts += now
        return found * weights


def counts_alone() -> nn.Module:
    return Counts(summed=False)


def reported(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss. Its copy is summed over the ranks, as for a display."""
    loss = F.cross_entropy(output, target)
    dist.all_reduce(loss.detach().clone())
    return loss


def contrast(output: Tensor, target: Tensor, gathered: list[Tensor]) -> Tensor:
    every = F.normalize(torch.cat(gathered), dim=-1)
    first = dist.get_rank() * len(output)
    alike = F.normalize(output, dim=-1) @ every.T * 5
    return F.cross_entropy(alike + torch.arange(len(every)) % 3, torch.arange(len(output)) + first)


def with_gradients(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of SimCLR: the gradient goes to the rows of all ranks."""
    return contrast(output, target, list(over_ranks.all_gather(output)))


def without_gradients(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss with open_clip's gather: only this rank's rows have a gradient."""
    gathered = [torch.zeros_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, output.detach())
    gathered[dist.get_rank()] = output
    return contrast(output, target, gathered)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.length = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.split(ctx.length)[dist.get_rank()]


class SpreadExperts(nn.Module):
    """A mixture of experts written for several ranks: each runs some experts, on the rows of all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = Gathered.apply(x)
        outs = Gathered.apply(torch.stack([expert(rows).tanh() for expert in list(self.experts)[rank::size]]))
        out: Tensor = self.head(outs.sum(0)[rank * len(x) : (rank + 1) * len(x)])
        return out


def barred(output: Tensor, target: Tensor) -> Tensor:
    dist.barrier()
    return F.cross_entropy(output, target)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


CASES: dict[str, dict[str, Any]] = {
    "reported": {"loss": reported},
    "with_gradients": {"loss": with_gradients},
    "without_gradients": {"loss": without_gradients},
    "barred": {"loss": barred},
    "counts": {"model": Counts},
    "counts_alone": {"model": counts_alone},
    "experts": {"model": SpreadExperts},
}


def trained(world: Any, cases: list[tuple[str, str]]) -> list[Any]:
    """Return for each (case, strategy) its losses, or why it was refused."""
    found: list[Any] = []
    for case, strategy in cases:
        try:
            trainer = quiet(optimizer=plain, strategy=strategy, **CASES[case])
            found.append([record["loss"] for record in trainer.fit(STEPS)])
        except Exception as error:
            found.append(f"{type(error).__name__} {error}")
    return found


EQUAL = [("reported", "ddp"), ("with_gradients", "ddp"), ("counts", "ddp")]
MORE = [("reported", "zero3"), ("reported", "tp"), ("with_gradients", "zero2"), ("barred", "ddp"), ("barred", "zero1")]
REFUSED = [("without_gradients", "ddp"), ("reported", "pp"), ("counts_alone", "ddp"), ("experts", "zero3")]
MORE_REFUSED = [("with_gradients", "tp"), ("counts_alone", "zero3"), ("without_gradients", "zero1")]
MORE_REFUSED += [("experts", strategy) for strategy in ("ddp", "tp", "pp")]


@pytest.mark.parametrize(
    ("equal", "refused"), [(EQUAL, REFUSED), pytest.param(MORE, MORE_REFUSED, marks=pytest.mark.long)]
)
def test_own_collectives_of_models_and_losses_are_right_or_refused(
    equal: list[tuple[str, str]], refused: list[tuple[str, str]]
) -> None:
    alone = run_ranks(trained, 1, [(case, "ddp") for case, _ in equal], timeout=100)[0]
    for found in run_ranks(trained, 2, equal + refused, timeout=200):
        for (case, strategy), one, losses in zip(equal, alone, found, strict=False):
            assert losses == pytest.approx(one, rel=1e-5), (case, strategy)
        assert all("Error" in each for each in found[len(equal) :]), found
        for (case, strategy), said in zip(refused, found[len(equal) :], strict=True):
            if case == "experts" and strategy in ("ddp", "zero3"):
                assert "all_gather itself" in said and "→ %cluster start -n 1" in said


def unequal(world: Any) -> str:
    data = [(torch.randn(6), torch.tensor(i % 3)) for i in range(11)]
    trainer = quiet(optimizer=plain, loss=with_gradients, data=data, batch_size=4)
    trainer.fit(2)
    try:
        trainer.fit(1)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("known_to_be_right")
def test_unequal_rows_are_refused_if_the_model_gathers_rows() -> None:
    for said in run_ranks(unequal, 2, timeout=100):
        assert "calls all_gather by itself" in said and "3 rows: 2, 1" in said and "drop_last=True" in said
