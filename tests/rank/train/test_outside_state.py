"""Test that models and losses with state outside of parameters and buffers equal plain torch, or are refused."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import os
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from jobs import points, quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate

import nbkit
from nbkit.rank.parallel.proof.outside_state import OutsideState, find_outside
from nbkit.rank.parallel.proof.short_example import first_runs
from verify.models import bound as bound_models
from verify.models import stateful

STEPS = 5
STRATEGIES = ("ddp", "zero3", "tp", "chain")


def cases() -> dict[str, tuple[type[nn.Module], Any]]:
    return {kind.__name__: (kind, stateful.plain) for kind in stateful.MODELS} | {
        loss.__name__: (stateful.Base, loss) for loss in stateful.LOSSES
    }


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_torch(name: str) -> list[float]:
    """Return the losses of one process, without nbkit."""
    stateful.begin()
    kind, loss = cases()[name]
    torch.manual_seed(7)
    model, data, losses = kind(), points(), []
    optimizer = plain(model)
    for step in range(STEPS):
        chosen = [data[(step * 8 + i) % len(data)] for i in range(8)]
        x, y = (torch.stack(part) for part in zip(*chosen, strict=True))
        value: Tensor = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def by_nbkit(name: str, strategy: str) -> list[float] | str:
    """Return the losses, or why there are none. "chain": with live switches, some of which may be refused."""
    stateful.begin()
    kind, loss = cases()[name]
    first = "ddp" if strategy == "chain" else strategy
    try:
        trainer = quiet(
            model=kind, loss=loss, optimizer=plain, strategy=first, loading=nbkit.Loading(shuffle=False), seed=7
        )
    except Exception as error:
        return f"{type(error).__name__} {error}"
    for to in (None,) * (STEPS - 1) if strategy != "chain" else ("zero3", "tp", "zero1", "ddp"):
        trainer.fit(1)
        if to is not None:
            try:
                trainer.switch(to)
            except Exception as error:
                if "Error" not in type(error).__name__:
                    raise
    trainer.fit(1)
    return [record["loss"] for record in trainer.history]


def trained(world: Any, names: list[str]) -> dict[tuple[str, str], tuple[Any, Any]]:
    found = {}
    for name in names:
        one = by_torch(name)
        for strategy in STRATEGIES:
            try:
                found[name, strategy] = one, by_nbkit(name, strategy)
            except Exception as error:
                found[name, strategy] = one, f"LATE {type(error).__name__} {error}"
    return found


SAMPLE = ["Hidden", "Calls", "ByGlobal", "Centred", "CountsRows", "FirstRow", "OnWeight", "Generating"]
SAMPLE += ["Tabled", "Recurrent"]
REST = [name for name in cases() if name not in SAMPLE]


@pytest.mark.long
@pytest.mark.parametrize("names", [SAMPLE, *(pytest.param(REST[i::8], marks=pytest.mark.long) for i in range(8))])
def test_state_outside_of_a_model_is_right_or_refused(names: list[str]) -> None:
    wrong = {}
    for found in run_ranks(trained, 2, names, timeout=60 + 30 * len(names)):
        for case, (one, losses) in found.items():
            refused = isinstance(losses, str) and not losses.startswith("LATE")
            if not refused and losses != pytest.approx(one, rel=1e-5):
                wrong[case] = one, losses
    assert not wrong


def saved(world: Any) -> tuple[list[float], list[float], list[str]]:
    stateful.begin()
    trainer = quiet(model=stateful.Calls, loss=stateful.plain, optimizer=plain, loading=nbkit.Loading(shuffle=False))
    trainer.fit(2)
    trainer.save("counted")
    trainer.fit(2)
    other = quiet(model=stateful.Calls, loss=stateful.plain, optimizer=plain, loading=nbkit.Loading(shuffle=False))
    other.load("counted")
    other.fit(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet(model=stateful.Hidden, loss=stateful.plain, optimizer=plain).save("hidden")
    found = [[record["loss"] for record in each.history] for each in (trainer, other)]
    return found[0], found[1], [str(each.message) for each in said]


def test_a_count_is_in_the_checkpoint_and_a_hidden_state_gives_a_warning() -> None:
    (losses, loaded, said), second = run_ranks(saved, 2, timeout=60)
    assert loaded == losses and second[:2] == (losses, loaded)
    assert any("no checkpoint holds 'state'" in each for each in said)


def test_changed_state_is_found_and_restored() -> None:
    model, target = stateful.Nested(), stateful.warmed
    stateful.begin()
    state = OutsideState(model, target, stateful.ByGlobalDict())
    model(torch.ones(2, 6))
    stateful.COUNTS["calls"] += 1
    target(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert set(state.changes()) == {"state.of.calls[0]", "COUNTS.calls", "warmed[0][0]"}
    state.put_back()
    assert not state.changes() and model.state == {"of": {"calls": [0]}} and stateful.COUNTS == {"calls": 0}


@pytest.mark.parametrize(
    ("name", "by_rows", "per_row", "tensors"),
    [
        ("Hidden", True, True, True),
        ("Memory", True, True, True),
        ("Centred", True, False, True),
        ("Calls", False, True, False),
        ("Every3", False, True, False),
        ("Teacher", False, True, True),
    ],
)
def test_dependence_of_state_on_rows_is_found_by_running_the_model(
    name: str, by_rows: bool, per_row: bool, tensors: bool
) -> None:
    torch.manual_seed(7)
    found = first_runs(cases()[name][0](), default_collate(points(2)), inputs=None, loss=stateful.plain).outside
    assert found is not None
    assert (found.by_rows, found.per_row, found.tensors) == (by_rows, per_row, tensors)


@pytest.mark.parametrize("name", ["OnceComputed", "OnceCached"])
def test_a_cache_computed_from_the_weights_once_is_kept(name: str) -> None:
    model = cases()[name][0]()
    before = [p.detach().clone() for p in model.parameters()]
    found = first_runs(model, default_collate(points(2)), inputs=None, loss=stateful.plain).outside
    assert found is not None and not found.by_rows
    assert found.keyed == (("OnceCached.table",) if name == "OnceCached" else ())
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["Cached", "Tabled", "Normed", "Lambdas", "ByHand", "CountsPasses"])
def test_state_that_makes_no_difference_is_ignored(name: str) -> None:
    model = cases()[name][0]()
    found = first_runs(model, default_collate(points(2)), inputs=None, loss=stateful.plain)
    assert found.outside is None
    assert found.caches == ({("", "length")} if name == "Tabled" else set())


class Logs(stateful.Base):
    """Reads its count of passes and the values of the pass before the last one. Keeps others only for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last, self.before_last = 0, 0.0, 0.0
        self.hidden: list[Tensor] = []
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hidden.clear()
        self.hidden.append(x.detach())
        self.mean = float(x.mean())
        output: Tensor = super().forward(x + self.before_last)
        self.before_last, self.last = self.last, float(x.sum())
        return output * self.calls


def test_a_value_kept_for_a_log_is_not_taken_for_state() -> None:
    found = first_runs(Logs(), default_collate(points(2)), inputs=None, loss=stateful.plain).outside
    assert found is not None and set(found.names) == {"calls", "last"}


class LogsMany(stateful.Base):
    """Reads its count of passes, and keeps `many` numbers for a log."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self.calls, self.many = 0, many
        for number in range(many):
            setattr(self, f"mean{number}", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number in range(self.many):
            setattr(self, f"mean{number}", float(x.mean()) + number + 1)
        output: Tensor = super().forward(x)
        return output * self.calls


def test_many_values_kept_for_a_log_need_no_more_passes_than_a_few() -> None:
    passes = []
    for many in (2, 30):
        model, x = LogsMany(many), default_collate(points(2))[0]
        seen = list[Any]()

        def run(rows: Any, model: nn.Module = model, x: Tensor = x, seen: list[Any] = seen) -> Any:
            seen.append(rows)
            return model(x[list(rows)])

        found = find_outside(run, OutsideState(model))
        assert found is not None and found.names == ("calls",)
        passes.append(len(seen))
    assert passes[0] == passes[1]


def test_a_mode_that_every_pass_flips_is_not_taken_for_a_cache() -> None:
    found = first_runs(stateful.Flipping(), default_collate(points(2)), inputs=None, loss=stateful.plain)
    assert not found.caches


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Settings:
    n = 0


class Counted(torch.autograd.Function):
    n = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Counted.n += 1
        return grad / Counted.n


VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
LOCAL = threading.local()
LOCAL.n = 0
HELD: dict[str, Any] = {
    "namespace": types.SimpleNamespace(n=0),
    "arguments": argparse.Namespace(n=0),
    "dict": collections.UserDict(n=0),
    "numpy": numpy.zeros(2),
    "bytes": bytearray(2),
    "array": array.array("d", [0.0, 0.0]),
    "slots": Slotted(),
    "event": threading.Event(),
}


def _attribute(of: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: of.n, lambda: setattr(of, "n", of.n + 1)


def _item(of: Any, key: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: of[key], lambda: of.__setitem__(key, of[key] + 1)


HOLDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{name: _attribute(HELD[name]) for name in ("namespace", "arguments", "slots")},
    **{name: _item(HELD[name], 1) for name in ("numpy", "bytes", "array")},
    "dict": _item(HELD["dict"], "n"),
    "event": (HELD["event"].is_set, HELD["event"].set),
    "a class": _attribute(Settings),
    "a thread's own": _attribute(LOCAL),
    "variable": (VARIABLE.get, lambda: VARIABLE.set(VARIABLE.get() + 1)),
    "environment": (
        lambda: int(os.environ.get("PASSES", "0")),
        lambda: os.environ.__setitem__("PASSES", str(int(os.environ.get("PASSES", "0")) + 1)),
    ),
}


class Holding(nn.Linear):
    """A linear map that counts its passes in one of `HOLDS`."""

    def __init__(self, name: str) -> None:
        super().__init__(6, 3)
        self.held, (_, self.count) = HELD.get(name), HOLDS[name]

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        assert Settings, (VARIABLE, LOCAL, os.environ)  # so that these are names of this function
        return super().forward(x)


@pytest.mark.parametrize("name", HOLDS)
def test_state_in_objects_of_libraries_is_found_and_restored(name: str) -> None:
    model, read = Holding(name), HOLDS[name][0]
    state, before = OutsideState(model), read()
    model(torch.zeros(2, 6))
    assert read() != before and state.changes()
    state.put_back()
    assert read() == before and not state.changes()


def test_iterators_and_attributes_of_weights_are_found_and_restored() -> None:
    model, rows = nn.ModuleList([stateful.Generating(), stateful.OnWeight(), stateful.Cycling()]), torch.ones(2, 6)
    state = OutsideState(model)
    first = [part(rows) for part in model]
    assert set(state.changes()) == {"0.scales", "1.body.weight.calls", "2.scales"}
    assert state.on_tensors(["0.scales", "1.body.weight.calls"]) == ("1.body.weight.calls",)
    for _ in range(3):
        for part in model:
            part(rows)
        state.put_back()
        assert not state.changes()
        assert all(torch.equal(part(rows), once) for part, once in zip(model, first, strict=True))
        state.put_back()


def test_hooks_and_the_flag_that_they_are_installed_are_restored() -> None:
    model, (rows, _) = bound_models.built("lazy hooks"), bound_models.batch()
    state = OutsideState(model)
    first = model(rows)
    assert set(state.changes()) == {"_hooks_installed", "blocks.0._sink", "blocks.1._sink"}
    for _ in range(2):
        state.put_back()
        assert not any(part._forward_hooks for part in model.modules())
        assert torch.equal(model(rows), first)
    found = first_runs(bound_models.built("lazy hooks"), bound_models.batch(), inputs=None, loss=nn.functional.mse_loss)
    assert found.outside is None and found.caches == {("", "_hooks_installed")}


def test_a_generator_that_receives_values_is_not_replaced() -> None:
    class Sends(stateful.Generating):
        def between(self, h: Tensor) -> Tensor:
            return h * self.scales.send(None)

    model = Sends()
    state, before = OutsideState(model), model.scales
    assert model.scales is before and state.unkept == ["'scales', a generator", "'held[0]', a generator"]


class Notes(stateful.Base):
    """A model that puts a term for the loss into one list, and itself into another."""

    def init(self) -> None:
        LAST[:] = [self]

    def between(self, h: Tensor) -> Tensor:
        self.term = 0.1 * h.pow(2).mean()
        TERMS.append(self.term)
        return h


LAST: list[Any] = []
TERMS: list[Tensor] = []


def with_terms(output: Tensor, target: Tensor) -> Tensor:
    terms = sum(TERMS)
    TERMS.clear()
    return stateful.plain(output, target) + terms


def with_term_of_last(output: Tensor, target: Tensor) -> Tensor:
    return stateful.plain(output, target) + LAST[0].term  # type: ignore[no-any-return]


def _by_terms(world: Any) -> list[list[float]]:
    found = []
    for loss, strategy in ((with_terms, "zero3"), (with_term_of_last, "ddp")):
        trainer = quiet(
            model=Notes, loss=loss, optimizer=plain, strategy=strategy, loading=nbkit.Loading(shuffle=False), seed=7
        )
        found.append([record["loss"] for record in trainer.fit(3)])
    return found


def test_a_loss_with_a_term_from_a_global_equals_one_process() -> None:
    one = run_ranks(_by_terms, 1)[0]
    assert one[0] == pytest.approx(one[1], rel=1e-6)
    for found in run_ranks(_by_terms, 2):
        assert found[0] == pytest.approx(one[0], rel=1e-5) and found[1] == pytest.approx(one[0], rel=1e-5)


def _switched(world: Any) -> list[str]:
    said = []
    for kind in (stateful.ByItself, stateful.WeaklyByItself, stateful.BoundNext):
        stateful.begin()
        try:
            trainer = quiet(model=kind, loss=stateful.plain, optimizer=plain)
            trainer.fit(1)
            trainer.switch("zero3")
        except Exception as error:
            said.append(f"{len(trainer.history)} {error}")
    trainer = quiet(model=stateful.ReadsMark, loss=stateful.plain, optimizer=plain, strategy="zero3")
    trainer.model.body.weight.scale = 2.0  # like a live cell
    trainer.switch("tp")
    return [*said, str(trainer.model.body.weight.scale)]


def test_a_switch_that_would_lose_state_stored_by_model_is_refused() -> None:
    for strong, weak, unseen, mark in run_ranks(_switched, 2):
        assert strong.startswith("1 A switch to dp=2 zero=3 would lose 'OF_MODELS[ByItself]'")
        assert weak.startswith("1 A switch to dp=2 zero=3 would lose 'WEAKLY.data[WeaklyByItself]'")
        assert "neither see nor restore" in unseen and "it may be 'scale', a cycle" in unseen
        assert mark == "2.0"


class CountsBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Counted.apply(super().forward(x))  # type: ignore[no-any-return]


class ReadByMean(nn.Linear):
    """A model with a hidden state for each row, whose mean all rows read."""

    h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.h is not None:
            y = y + self.h.mean()
        self.h = y.detach()
        return y


def _looked_at(world: Any) -> list[Any]:
    refused = ""
    try:
        quiet(model=lambda: ReadByMean(6, 3))
    except Exception as error:
        refused = str(error)
    quiet(model=lambda: CountsBackward(6, 3))
    return [Counted.n, refused]


def test_analyses_change_no_class_counts_and_state_read_over_rows_is_refused() -> None:
    for passes, refused in run_ranks(_looked_at, 2):
        assert passes == 0
        assert "changes 'h' in each pass and reads it in the next" in refused
