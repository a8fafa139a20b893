"""Test that BatchNorm over several ranks is never silently different, and never waits for a rank that does not come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import nbkit
from nbkit.errors import TrainingError
from nbkit.mesh import AXES, Mesh
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.batch_norm import check_level, synchronised, takes_all_ranks

CPU = torch.device("cpu")


def ranks(dp: int, pp: int = 1) -> Axes:
    """Return the axes of rank 0, without groups, because nothing is sent here."""
    return Axes(Mesh(dp=dp, pp=pp), 0, dp, dict.fromkeys((*AXES, "shard", "replicate")))


def test_a_model_that_does_not_couple_samples_is_unchanged() -> None:
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    for model in (nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)), frozen):
        assert synchronised(model, axes=ranks(4), micros=8, device=CPU) is model
    for alone in (ranks(1), ranks(1, pp=4)):
        assert synchronised(norm := nn.BatchNorm1d(3), axes=alone, micros=1, device=CPU) is norm


class Activated(nn.BatchNorm2d):
    """A BatchNorm with an activation after it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Written(nn.BatchNorm2d):
    """A BatchNorm that calls the function, as in timm."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.momentum is not None
        held = self.running_mean, self.running_var, self.weight, self.bias
        y = nn.functional.batch_norm(input, *held, self.training, self.momentum, self.eps)
        return nn.functional.gelu(y)


def patched(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    plain = norm.forward
    norm.forward = lambda x: plain(x) * 1.1  # type: ignore[method-assign, assignment]
    return norm


class Image(nn.Module):
    """A model with BatchNorm of images and rows: cumulative mean, no weights, frozen, its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU())
            for norm in (
                nn.BatchNorm2d(4, momentum=None),
                nn.BatchNorm2d(4, affine=False),
                nn.BatchNorm2d(4),
                Activated(4),
                Written(4),
                patched(nn.BatchNorm2d(4)),
            )
        )
        norm = self.norm = nn.BatchNorm1d(4)
        self.normed: Any = lambda x: norm(x)
        self.head = nn.Linear(4, 3)

    def train(self, mode: bool = True) -> Image:
        super().train(mode)
        self.blocks[2][1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.normed(x.mean((2, 3))))  # type: ignore[no-any-return]


def trained(recompute: bool | str = False) -> nbkit.Trainer:
    torch.manual_seed(0)
    images = torch.randn(33, 1, 5, 5, dtype=torch.float64) * torch.linspace(0.2, 5, 33).view(-1, 1, 1, 1) + 100
    return nbkit.Trainer(
        model=lambda: Image().double(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        data=TensorDataset(images, torch.arange(33) % 3),
        batch_size=6,  # the last batch has two rows on one rank, one on the other
        log_dir=None,
        progress=False,
        compute=nbkit.Compute(recompute=recompute),
    )


def through_strategies(
    world: Any, strategies: list[str], recompute: bool | str
) -> tuple[list[float], dict[str, Tensor]]:
    trainer = trained(recompute)
    for strategy in strategies:
        if trainer.job.world_size > 1:
            trainer.switch(strategy)
        trainer.fit(3)
    return [record["loss"] for record in trainer.history], trainer.full_state_dict()


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.long), True, "selective"])
def test_losses_weights_and_running_statistics_equal_one_process(recompute: bool | str) -> None:
    strategies = ["ddp", "zero1", "zero3", "zero2"]
    ((losses, state),) = run_ranks(through_strategies, 1, strategies, False)

    for parted, held in run_ranks(through_strategies, 2, strategies, recompute):
        torch.testing.assert_close(parted, losses, rtol=1e-11, atol=1e-11)
        assert set(held) == set(state)
        assert "stem.1.running_var" in held
        for name, expected in state.items():
            torch.testing.assert_close(held[name], expected, rtol=1e-9, atol=1e-9, msg=name)


class Deep(nn.Module):
    """A model of consecutive BatchNorms over rows. For a batch of two rows, each divides by their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16))
            for _ in range(8)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x)  # type: ignore[no-any-return]


def through_deep(world: Any, strategies: list[str]) -> list[float]:
    torch.manual_seed(0)
    trainer = nbkit.Trainer(
        model=lambda: Deep().double(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
        data=TensorDataset(torch.randn(96, 16, dtype=torch.float64), torch.arange(96) % 3),
        batch_size=24,
        log_dir=None,
        progress=False,
    )
    for strategy in strategies:
        if trainer.job.world_size > 1:
            trainer.switch(strategy)
        trainer.fit(1)
    return [record["loss"] for record in trainer.history]


@pytest.mark.long
@pytest.mark.parametrize("strategies", [["zero3", "pp=2 microbatches=1"], ["ddp", "tp"]])
def test_a_deep_model_is_compared_on_enough_rows_for_its_statistics(strategies: list[str]) -> None:
    (expected,) = run_ranks(through_deep, 1, strategies)
    for losses in run_ranks(through_deep, 2, strategies):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)


def test_a_batch_norm_keeps_its_class() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    found = synchronised(model, axes=ranks(2), micros=1, device=torch.device("cuda"))
    assert takes_all_ranks(found[1]) and found is model  # type: ignore[index]
    assert type(found[1]) is nn.BatchNorm1d  # type: ignore[index]


def image() -> nn.Module:
    torch.manual_seed(0)
    return Image().double()


def evaluated_between(world: Any, images: Tensor, kinds: Tensor) -> list[float]:
    trainer = nbkit.Trainer(
        model=image,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
        data=TensorDataset(images, kinds),
        batch_size=11,
        loading=nbkit.Loading(shuffle=False),
        log_dir=None,
        progress=False,
    )
    found = [record["loss"] for record in trainer.fit(2)]
    trainer.evaluate(TensorDataset(images, kinds))
    return found + [record["loss"] for record in trainer.fit(2)]


def test_a_models_own_train_method_is_called_as_in_a_plain_loop() -> None:
    images, kinds = torch.randn(22, 1, 5, 5, dtype=torch.float64), torch.arange(22) % 3
    (found,) = run_ranks(evaluated_between, 1, images, kinds)

    model = image()
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.02), []
    model.train()
    for step in range(4):
        rows = slice(0, 11) if step % 2 == 0 else slice(11, 22)
        loss = nn.functional.cross_entropy(model(images[rows]), kinds[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert found == pytest.approx(wanted, rel=1e-11)


def test_batch_norm_with_micro_batches_of_a_pipeline_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(TrainingError, match="one micro-batch of the pipeline"):
        synchronised(model, axes=ranks(1, pp=2), micros=4, device=CPU)


@pytest.mark.parametrize(("total", "microbatch_size"), [(8, None), (5, None), (8, 2)])
def test_one_forward_on_every_rank_is_accepted(total: int, microbatch_size: int | None) -> None:
    check_level(total, ranks=4, microbatch_size=microbatch_size)


@pytest.mark.parametrize(
    ("total", "microbatch_size", "hint"),
    [(3, None, "drop_last"), (5, 1, "drop_last"), (9, 2, "drop_last"), (8, 1, "microbatch_size=None")],
)
def test_several_or_uneven_forwards_are_refused(total: int, microbatch_size: int | None, hint: str) -> None:
    with pytest.raises(TrainingError, match=hint):
        check_level(total, ranks=4, microbatch_size=microbatch_size)
