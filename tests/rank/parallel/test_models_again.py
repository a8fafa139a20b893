"""Test that a model from an earlier job can be used again, or is refused by name if a rank holds only a part of it."""

from __future__ import annotations

import copy
import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.forward_wrapper import Wrapper
from nbkit.rank.train.trainer import Trainer
from verify.models.specimens import ZOO, gpt

pytestmark = pytest.mark.usefixtures("known_to_be_right")

BEFORE: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "ddp"},
    "recompute": {"strategy": "zero1", "compute": nbkit.Compute(recompute=True)},
    "compile": {"strategy": "zero2", "compute": nbkit.Compute(compile="aot_eager")},
    "switched": {"strategy": "tp", "compute": nbkit.Compute(recompute=True)},
}
# Each kind of earlier job, and each kind of strategy: one gathers blocks, one cuts between them, one does neither.
AGAIN = [("plain", "zero3"), ("recompute", "pp microbatches=2"), ("switched", "ddp")]
COMPILED = [("compile", "zero3")]


def trainer(model: Any, **changed: Any) -> Trainer:
    ids, target = ZOO["gpt"].batch(16)
    asked: dict[str, Any] = {
        "model": model,
        "loss": ZOO["gpt"].loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": list(zip(ids, target, strict=True)),
        "batch_size": 4,
        "seed": 5,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))


def net(dropout: float = 0.1) -> nn.Module:
    return gpt(2, dropout=dropout).double()


def losses(job: Trainer) -> list[float]:
    return [record["loss"] for record in job.history]


def used_again(world: Any, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Return (losses, losses of a new model with the same weights) for each case."""
    found = {}
    for name, strategy in cases:
        build = partial(net, 0.0 if name == "compile" else 0.1)
        first = trainer(build, **BEFORE[name])
        first.fit(1)
        if name == "switched":
            first.switch("ddp")
        new = build()
        new.load_state_dict(first.full_state_dict())
        second, third = trainer(first.model, strategy=strategy), trainer(new, strategy=strategy)
        second.fit(1)
        third.fit(1)
        around = [part for part in second.model.modules() if isinstance(vars(part).get("forward"), Wrapper)]
        found[f"{name}, {strategy}"] = losses(second), [] if around else losses(third)
    return found


@pytest.mark.long
@pytest.mark.parametrize("cases", [AGAIN, COMPILED])
def test_a_used_model_trains_like_a_new_one_with_the_same_weights(cases: list[tuple[str, str]]) -> None:
    assert {name for name, _ in AGAIN + COMPILED} == set(BEFORE)
    for found in run_ranks(used_again, 2, cases, timeout=170):
        assert len(found) == len(cases)
        assert {name for name, (ours, anew) in found.items() if ours != anew} == set()


def in_parts(world: Any) -> dict[str, Any]:
    said = {}
    for strategy in ("zero3", "tp", "pp microbatches=2"):
        first = trainer(net, strategy=strategy)
        for what, model in (
            ("it", first.model),
            ("in another", nn.Sequential(first.model)),
            ("a part", first.model.blocks),
        ):
            with pytest.raises(TrainingError) as raised:
                trainer(model)
            said[strategy, what] = str(raised.value)
        first.fit(1)
    return said


@pytest.mark.long
def test_a_used_model_in_parts_is_refused_by_name() -> None:
    for said in run_ranks(in_parts, 2, timeout=120):
        assert len(said) == 9
        for (strategy, _), text in said.items():
            assert "has split it" in text and strategy.partition(" ")[0].replace("zero3", "zero=3") in text.replace(
                "pp=2", "pp"
            )
            assert "switch('ddp')" in text


def copied(world: Any, how: str) -> list[Any]:
    """Return whether a copy of a model in training has the right loss, and changes only its own gradients."""
    job = trainer(lambda: net(0.0), **BEFORE[how])
    job.fit(1)
    twin = copy.deepcopy(job.model)
    with torch.no_grad():
        next(twin.blocks.parameters()).mul_(2)
    ids, target = ZOO["gpt"].batch(2)
    loss = ZOO["gpt"].loss(twin(ids), target)
    loss.backward()
    plain = net(0.0)
    plain.load_state_dict(twin.state_dict())
    expected = ZOO["gpt"].loss(plain(ids), target)
    return [
        loss.item() == pytest.approx(expected.item(), rel=1e-12),
        all(p.grad is not None for p in twin.parameters()),
        all(p.grad is None for p in job.model.parameters()),
    ]


@pytest.mark.parametrize("how", ["recompute", pytest.param("compile", marks=pytest.mark.long)])
def test_a_copy_computes_with_its_own_weights(how: str) -> None:
    assert run_ranks(copied, 1, how, timeout=120) == [[True] * 3]


WIDTH = 256


def num_bytes() -> int:
    """Return the bytes of all storages of tensors of this process."""
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and not thing.is_meta:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def held_with_an_optimizer(world: Any) -> dict[str, float]:
    """Return the bytes per parameter after a step, while the user's model and optimizer still exist."""
    before = num_bytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    num = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(1, WIDTH)).sum().backward()
    optimizer.step()  # now it has moments of the whole model
    job = nbkit.prepare(
        model, optimizer, loss=lambda output, target: ((output - target) ** 2).mean(), strategy="ddp", log_dir=None
    )
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    found = {}
    for strategy in ("ddp", "zero3", "zero1"):
        job.switch(strategy)
        for _ in job.batches([batch]):
            job.backward((batch, batch))
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.sharded_model.data.reset()
        found[strategy] = (num_bytes() - before) / num
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in job.sharded_model.held.values()
        }
    return found


def test_a_given_optimizer_keeps_no_weights_alive() -> None:
    for found in run_ranks(held_with_an_optimizer, 2, timeout=120):
        expected = {"ddp": 16, "zero3": 16 / 2, "zero1": 8 + 8 / 2}
        assert found == {name: pytest.approx(size, rel=0.005) for name, size in expected.items()}
