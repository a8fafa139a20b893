"""Test that a strategy key from outside is parsed, refused, predicted and applied like nbkit's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import SEED, mean_loss, order, points, quiet
from ranks import run_ranks
from torch import Tensor, nn

from nbkit import techniques
from nbkit.errors import StrategyError
from nbkit.planner.choose.search import keys_that_help
from nbkit.planner.job_facts import Facts, Weight
from nbkit.planner.traffic import per_step
from nbkit.planner.validate import validate
from nbkit.rank.parallel.data_parallel.data_axis import _changed
from nbkit.rank.parallel.data_parallel.ddp import ReplicaSetup
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.replace.hand_over import handed_by
from nbkit.rank.train.replace.pickle_by_value import dumps, loads
from nbkit.strategy import Strategy
from nbkit.techniques import GradientKey, Key, registry

RANKS, ROWS, STEPS = 2, 8, 2
STRATEGY = "dp=2 wire=fp16"


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 3))


def forget() -> None:
    """Remove the key from this process."""
    registry._keys.pop("wire", None)
    registry._register_installed.cache_clear()
    sys.modules.pop("tests.plugins.wire", None)


@pytest.fixture
def registered() -> Iterator[None]:
    importlib.import_module("tests.plugins.wire")
    yield
    forget()


def trained(world: Any, folder: Path) -> dict[str, Any]:
    importlib.import_module("tests.plugins.wire")
    collectives.set_mode("count")
    trainer = quiet(strategy="ddp wire=fp16", model=wide)
    begin = collectives.ring.end
    trainer.fit(STEPS)
    calls, _ = collectives.ring.between(begin, collectives.ring.end)
    found: dict[str, Any] = {
        "seen": list(trainer.optimizer.inner.seen),
        "sent": sum(call.bytes for call in calls if call.op == "all_reduce" and call.bytes > 1024),
    }
    trainer.save(folder)
    trainer.switch("zero3")
    trainer.fit(1)
    trainer.switch(STRATEGY)
    trainer.fit(1)
    found["strategies"] = [record["strategy"] for record in trainer.history]
    handed = dumps(handed_by(trainer, trainer.job.strategy))
    again = quiet(strategy="ddp", model=wide)
    again.load(folder)
    found["loaded"] = len(again.history), again.step
    again.switch(STRATEGY)
    again.fit(1)
    found["after"] = again.history[-1]["loss"], trainer.history[STEPS]["loss"]
    # A new process does not have the key until it gets the training.
    forget()
    with pytest.raises(StrategyError, match="'wire' is not a key"):
        Strategy.parse(STRATEGY, RANKS)
    joined = loads(handed)
    for key in joined.keys:
        techniques.add(key)
    found["joined"] = str(joined.strategy), joined.strategy == Strategy.parse(STRATEGY, RANKS)
    return found


def by_hand() -> list[Tensor]:
    """Return the gradients of each step: of both halves of the batch, rounded to fp16, and added as fp16."""
    torch.manual_seed(SEED)
    model, data, found = wide(), points(), []
    optimizer, indices = torch.optim.SGD(model.parameters(), lr=0.1), order(len(points()), 0)
    for step in range(STEPS):
        halves = []
        for rank in range(RANKS):
            first = step * ROWS + rank * ROWS // RANKS
            rows = [data[i] for i in indices[first : first + ROWS // RANKS]]
            optimizer.zero_grad()
            x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
            (mean_loss(model(x), y) / RANKS).backward()
            halves.append([p.grad.half() for p in model.parameters() if p.grad is not None])
        for p, one, other in zip(model.parameters(), *halves, strict=True):
            p.grad = (one + other).float()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return found


def test_a_key_is_applied_on_ranks_and_kept_in_checkpoints_and_new_processes(tmp_path: Path) -> None:
    expected = by_hand()
    weights = [Weight(name, tuple(p.shape)) for name, p in wide().named_parameters()]
    importlib.import_module("tests.plugins.wire")
    predicted = per_step(weights, Facts(), Strategy.parse(STRATEGY, RANKS), 0)
    forget()

    for found in run_ranks(trained, RANKS, tmp_path / "saved"):
        for grads, of_one_process in zip(found["seen"], expected, strict=True):
            assert torch.equal(grads, grads.half().float())
            torch.testing.assert_close(grads, of_one_process, rtol=2e-3, atol=1e-6)
        assert found["sent"] == pytest.approx(STEPS * sum(term.given for term in predicted), rel=0.01)
        assert found["strategies"] == [STRATEGY, STRATEGY, "dp=2 zero=3", STRATEGY]
        assert found["loaded"] == (STEPS, STEPS)
        assert found["after"][0] == pytest.approx(found["after"][1], rel=1e-3)
        assert found["joined"] == (STRATEGY, True)


def test_a_key_is_part_of_a_strategy_and_of_predictions(registered: None) -> None:
    strategy = Strategy.parse("ddp wire=fp16 bucket=4M", 4)
    assert str(strategy) == "dp=4 bucket=4M wire=fp16" and strategy == Strategy.parse(str(strategy), 4)
    assert strategy != Strategy.parse("ddp bucket=4M", 4) and len({strategy, Strategy.parse(str(strategy), 4)}) == 1
    assert "wire=fp16: gradients are rounded." in [finding.what for finding in validate(strategy, Facts())]
    weights = [Weight("w", (1000, 1000))]
    plain, halved = (per_step(weights, Facts(), Strategy.parse(text, 4), 0) for text in ("ddp", "ddp wire=fp16"))
    assert sum(term.wire for term in halved) == sum(term.wire for term in plain) / 2
    tried = keys_that_help(Strategy(dp=4), 1.0, lambda other: 0.5 if "wire" in other.settings else 1.0)
    assert tried == {"wire=fp16": 0.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ddp wire=int4", "'wire=int4' is not a format"),
        ("zero1 wire=fp16", "wire=fp16 is for ranks that hold the whole model(.|\n)*dp=4 wire=fp16"),
        ("tp wire=fp16", "two or more data parallel ranks"),
        ("ddp compress=int8 wire=fp16", "Each of two keys decides(.|\n)*compress=int8, or wire=fp16"),
        ("ddp sync_every=4 wire=fp16", "no gradients are sent"),
    ],
)
def test_a_wrong_use_of_a_key_is_refused_with_a_reason(registered: None, text: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Strategy.parse(text, 4)


def test_a_key_can_refuse_a_strategy_itself(registered: None) -> None:
    with pytest.raises(StrategyError, match="overflow in fp16"):
        Strategy.parse("ddp wire=fp16", 2048)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("compress", "one of nbkit's own"),
        ("dp", "one of nbkit's own"),
        ("my key", "cannot be the name"),
        (None, "name"),
    ],
)
def test_names_that_are_taken_or_cannot_be_typed_are_refused(name: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        techniques.register(type("Mine", (GradientKey,), {"name": name}))


@pytest.mark.parametrize(
    ("base", "more"), [(GradientKey, {"needs_whole": False}), (Key, {}), (Key, {"needs_whole": True})]
)
def test_a_torch_half_that_would_not_be_called_is_refused(base: type[Key], more: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="would not be called under zero1"):
        techniques.register(type("Own", (base,), {"name": "own", "engine": "a:b", "parse": str, **more}))
    assert "own" not in techniques.names()


def test_a_package_registers_a_key_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "wire-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: wire\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[nbkit.techniques]\nwire = tests.plugins.wire:Wire\n")
    forget()
    with pytest.raises(StrategyError, match="'wire' is not a key"):
        Strategy.parse(STRATEGY, RANKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._register_installed.cache_clear()
    assert str(Strategy.parse(STRATEGY, RANKS)) == STRATEGY
    (package / "entry_points.txt").write_text("[nbkit.techniques]\nwire = tests.plugins.nowhere:Wire\n")
    forget()
    with pytest.raises(StrategyError, match=r"'wire' of an installed package cannot be loaded(.|\n)*uninstall wire"):
        Strategy.parse(STRATEGY, RANKS)
    forget()


class Clips(GradientKey):
    """A key that writes its value with a format that None does not take."""

    name = "clips"
    needs_whole = False

    def parse(self, text: str) -> float:
        return float(text)

    def spell(self, value: float) -> str:
        return f"{value:g}"


def test_spell_is_called_only_if_the_key_is_given() -> None:
    techniques.register(Clips)
    try:
        assert str(Strategy.parse("ddp clips=0.50", 2)) == "dp=2 clips=0.5"
        assert str(Strategy.parse("pp=2 microbatches=4", 2)) == "pp=2 schedule=1f1b microbatches=4"
        with pytest.raises(StrategyError, match=r"clips=much cannot be read(.|\n)*ValueError(.|\n)*test_key.py"):
            Strategy.parse("ddp clips=much", 2)
    finally:
        registry._keys.pop("clips")


class InWords(Clips):
    """A key whose `spell` changes some values, or writes a space."""

    name = "words"

    def parse(self, text: str) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(text.split(":"))

    def spell(self, value: tuple[str, ...]) -> str:  # type: ignore[override]
        return {2: " ", 3: ":"}.get(len(value), "").join(value).upper()


def test_a_value_that_its_key_cannot_read_again_is_refused() -> None:
    techniques.register(InWords)
    try:
        assert str(Strategy.parse("ddp words=a:b:c", 2)) == "dp=2 words=A:B:C"
        for text in ("a:b", "a:b:c:d"):
            with pytest.raises(StrategyError, match=r"'words' cannot read what it spells(.|\n)*its spell is 'A"):
                Strategy.parse(f"ddp words={text}", 2)
    finally:
        registry._keys.pop("words")


class Silent(GradientKey):
    name = "silent"

    def parse(self, text: str) -> str:
        return text


class Mute(Clips):
    name = "mute"
    parse = techniques.Key.parse  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (object, "derives from Key or GradientKey"),
        (Silent, "would change nothing: it has no torch half"),
        (Mute, "cannot read its value"),
    ],
)
def test_a_key_that_cannot_work_is_not_registered(key: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        techniques.register(key)


def test_a_torch_half_that_returns_no_setup_is_reported() -> None:
    with pytest.raises(StrategyError, match=r"torch half of wire=fp16 gave no ReplicaSetup"):
        _changed(ReplicaSetup(2), lambda value, setup: None, "wire", "fp16")
    with pytest.raises(StrategyError, match=r"torch half of wire=fp16 raised an error(.|\n)*takes 1 positional"):
        _changed(ReplicaSetup(2), lambda value: value, "wire", "fp16")
