"""Test that a copy of a model whose functions hold its parts gets its own functions, or is refused by name."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.copies import built_again, homes, replace_submodule, skeleton_of
from nbkit.rank.train.trainer import Trainer
from verify.models import bound as bound_models
from verify.models.bound import MODELS, batch, built, plainly

NOT_COPIED = {"local class", "global"}
SAMPLE = ["lambda", "partial of weights", "borrowed", "lora and hook", "lazy hooks", "local class"]
REST = [name for name in MODELS if name not in SAMPLE]
CHAIN = "zero1 > dp=1 tp=2 > zero3 > ddp"
NO_TP = {"patched block", "shared part", "lambda and patch"}
"""Cases that tp refuses: the object of a module that tp splits has a replaced forward."""

NO_PP = {"lazy hooks", "by proxy", "siblings"}
"""Cases that a pipeline refuses before training."""


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_computes_with_its_own_parts_or_is_refused_by_name(name: str) -> None:
    model, values = built(name), batch()[0]
    made = skeleton_of(skeleton_of(model))
    for path, places in homes(made).items():
        replace_submodule(places, nn.Parameter(torch.full_like(model.get_parameter(path), 0.1)))
    output = made(values)
    output.sum().backward()

    touched = any(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    assert touched == (name in NOT_COPIED)
    assert torch.equal(model(values), output) == (name not in NOT_COPIED)

    said = nbkit.check(built(name), "zero1", batch(), 2, loss=F.mse_loss)
    assert said.ok == (name not in NOT_COPIED), str(said)
    if name in NOT_COPIED:
        assert "reads 'inp.weight' of the model that was copied" in str(said)
        assert nbkit.check(built(name), "ddp", batch(), 2, loss=F.mse_loss).ok


def losses(world: Any, names: list[str], chains: list[str], instance: bool) -> dict[tuple[str, str], list[float]]:
    warnings.simplefilter("ignore")
    found = {}
    data = [row for step in range(8) for row in zip(*batch(step), strict=True)]
    for name, chain in [(name, chain) for name in names for chain in chains]:
        first, *later = chain.split(" > ")
        trainer = Trainer(
            model=built(name) if instance else partial(built, name),
            loss=F.mse_loss,
            optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
            data=data,
            batch_size=bound_models.ROWS,
            loading=nbkit.Loading(shuffle=False),
            strategy=first,
            log_dir=None,
            progress=False,
        )
        trainer.fit(2)
        for strategy in later:
            trainer.switch(strategy)
            trainer.fit(2)
        found[name, chain] = [record["loss"] for record in trainer.history]
    return found


def compare(names: list[str], chains: list[str], instance: bool = False) -> None:
    for (name, _), found in run_ranks(losses, 2, names, chains, instance, timeout=300)[0].items():
        assert found == pytest.approx(plainly(name, len(found)), rel=1e-9), name


@pytest.mark.long
@pytest.mark.parametrize("names", [SAMPLE, pytest.param(REST, marks=pytest.mark.long)])
def test_parts_held_by_functions_train_right_through_switches(names: list[str]) -> None:
    compare([name for name in names if name not in NO_TP | NOT_COPIED], [CHAIN])


@pytest.mark.long
def test_a_model_that_cannot_be_copied_is_built_again() -> None:
    compare(["local class"], [CHAIN])


def calls_counted(world: Any) -> list[int]:
    found = []
    for strategy in ("ddp", "tp"):
        bound_models.ByClass.calls = 0
        losses(world, ["class"], [strategy], False)
        found.append(bound_models.ByClass.calls)
    return found


def test_modules_keep_their_classes_through_switches() -> None:
    compare(["class"], ["tp > pp > zero3"])
    assert run_ranks(calls_counted, 2) == [[4, 4]] * 2


@pytest.mark.long
@pytest.mark.parametrize("instance", [False, True])
def test_weak_references_and_modules_as_keys_work_in_copies(instance: bool) -> None:
    compare(["weakly"], ["pp > zero1 > tp"], instance)
    compare(["siblings", "by proxy"], ["tp > zero3"], instance)


def test_a_class_patched_by_the_callable_is_patched_once() -> None:
    compare(["patched class"], ["zero3 > tp"])


@pytest.mark.long
def test_attention_in_closures_works_with_context_tensor_and_pipeline_axes() -> None:
    compare(["attention"], ["cp=2 > dp=1 tp=2 > pp > ddp"])


@pytest.mark.long
@pytest.mark.parametrize("instance", [False, True])
def test_every_model_trains_right_under_the_strategies_that_accept_it(instance: bool) -> None:
    names = [name for name in MODELS if name not in NOT_COPIED]
    compare([name for name in names if name not in NO_PP], ["pp > zero2"], instance)
    compare([name for name in names if name in NO_TP], ["zero1 > zero3 > ddp"], instance)
    compare([name for name in names if name not in NO_TP], [CHAIN], instance)


def test_building_a_model_again_restores_outside_state() -> None:
    calls, generator = list[int](), torch.get_rng_state()

    def build() -> nn.Module:
        calls.append(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].running_mean += len(calls)
        model.scale = len(calls)  # type: ignore[assignment]
        return model

    first = build()
    generator = torch.get_rng_state()
    again = built_again(build, skeleton_of(first), first=first)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(again[1].running_mean, torch.ones(8)) and again.scale == 1  # type: ignore[index]
    for same in (lambda: first, lambda: nn.Sequential(first[0], nn.BatchNorm1d(8))):
        with pytest.raises(TrainingError, match="same object each time"):
            built_again(same, skeleton_of(first), first=first)
    with pytest.raises(TrainingError, match=r"parameter .* is another"):
        built_again(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), skeleton_of(first))


def test_a_callable_that_sets_a_global_is_refused_and_the_global_kept() -> None:
    build = partial(built, "global")
    held, first = bound_models._GLOBAL, build()
    assert nbkit.check(build, "ddp", batch(), 2, loss=F.mse_loss).ok
    named = held["inp"]
    assert named is not first.inp
    built_again(build, skeleton_of(first), first=first)
    assert held["inp"] is named
    said = nbkit.check(build, "zero1", batch(), 2, loss=F.mse_loss)
    assert not said.ok and "GlobalBlock.forward reads 'inp.weight' of the model that was copied" in str(said)


class Locked(nn.Linear):
    """A linear map with a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Sharing(nn.Linear):
    """A linear map whose copy is itself."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Slotted(nn.Linear):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = 2.0


def locked(world: Any) -> list[str]:
    said = []
    for model in (Locked, Locked(), Sharing, Sharing(), Slotted):
        try:
            trainer = Trainer(
                model=model,
                loss=lambda y, target: F.mse_loss(y, target.float()),
                optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
                data=list(zip(*batch(), strict=True)),
                batch_size=8,
                strategy="zero1",
                log_dir=None,
                progress=False,
            )
            said.append(f"{len(trainer.fit(1))} step")
        except TrainingError as error:
            said.append(str(error))
    return said


class Rejecting(nn.Module):
    """A model that draws until the numbers fit. Here it gives up without new numbers; a real one would not end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(64)), nn.Parameter(torch.empty(64))
        nn.init.trunc_normal_(self.first, std=0.02)
        with torch.no_grad():
            for _ in range(9):
                if 0 < self.second.fill_(0.0).normal_().std() < 2:
                    return
        raise RuntimeError("no numbers were drawn")


def test_a_model_that_draws_until_the_numbers_fit_can_be_built_again(tmp_path: Path) -> None:
    first = Rejecting()
    calls = tmp_path / "calls"  # a file, because a list would be restored after a call

    def build() -> nn.Module:
        with calls.open("a") as file:
            file.write("x")
        return Rejecting()

    built_again(build, skeleton_of(first), first=first)
    assert calls.read_text() == "x"  # after an error there would be a second call


def test_uncopyable_models_are_built_again_or_refused_as_instances() -> None:
    trained, refused, trained_too, shares, slotted = run_ranks(locked, 2)[0]
    assert trained == trained_too == "1 step"
    for text in (refused, shares):
        assert "nbkit cannot copy the model" in text and "model=lambda: MyModule(...)" in text
    assert "a copy of the model, a Sharing, shares its parts with it, by its own __deepcopy__" in shares
    assert "values in __slots__" in slotted and "'scale' of the model, a Slotted" in slotted
