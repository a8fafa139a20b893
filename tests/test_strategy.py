"""Test that a strategy has one canonical text, and that an impossible one is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import product

import pytest

from nbkit import techniques
from nbkit.errors import StrategyError
from nbkit.mesh import Mesh
from nbkit.schedules import BUILT_IN as SCHEDULES
from nbkit.strategy import Strategy

# text on 4 ranks -> canonical form, label
ON_FOUR = {
    "ddp": ("dp=4", "ddp"),
    "dp=4": ("dp=4", "ddp"),
    "ddp dp=4": ("dp=4", "ddp"),
    " DDP ": ("dp=4", "ddp"),
    "dp=4 tp=1 pp=1 zero=0 microbatches=1": ("dp=4", "ddp"),
    "zero=0": ("dp=4", "ddp"),
    "zero1": ("dp=4 zero=1", "zero1"),
    "zero2": ("dp=4 zero=2", "zero2"),
    "zero3": ("dp=4 zero=3", "zero3"),
    "fsdp": ("dp=4 zero=3", "zero3"),
    "zero3 shard=4": ("dp=4 zero=3", "zero3"),
    "hsdp": ("dp=4 zero=3 shard=2", "hsdp"),
    "hsdp shard=2": ("dp=4 zero=3 shard=2", "hsdp"),
    "hsdp zero=2": ("dp=4 zero=2 shard=2", "hsdp"),
    "tp": ("tp=4", "tp"),
    "tp=4 dp=1": ("tp=4", "tp"),
    "tp=2": ("dp=2 tp=2", "ddp+tp"),
    "tp tp=2": ("dp=2 tp=2", "ddp+tp"),
    "tp dp=2": ("dp=2 tp=2", "ddp+tp"),
    "zero3 tp=2": ("dp=2 tp=2 zero=3", "zero3+tp"),
    "zero=3 dp=2 tp=2": ("dp=2 tp=2 zero=3", "zero3+tp"),
    "pp": ("pp=4 schedule=1f1b microbatches=8", "pp"),
    "pp schedule=ZBV microbatches=3": ("pp=4 schedule=zbv microbatches=3", "pp"),
    "pp schedule=zb microbatches=6": ("pp=4 schedule=zb microbatches=6", "pp"),
    "pp=2 microbatches=1": ("dp=2 pp=2 schedule=1f1b microbatches=1", "ddp+pp"),
    "dp=2 pp=2 schedule=zbv": ("dp=2 pp=2 schedule=zbv microbatches=4", "ddp+pp"),
    "tp pp=2": ("tp=2 pp=2 schedule=1f1b microbatches=4", "tp+pp"),
    "cp=2": ("dp=2 cp=2", "ddp+cp"),
    "dp=1 cp=4": ("cp=4", "cp"),
    "ddp bucket=25M": ("dp=4", "ddp"),
    "zero2 bucket=2048k": ("dp=4 zero=2 bucket=2M", "zero2"),
    "tp=2 tp_chunks=4": ("dp=2 tp=2 tp_chunks=4", "ddp+tp"),
    "ddp bucket=1000 compress=INT8": ("dp=4 bucket=1000 compress=int8", "ddp"),
    "dp=4 sync_every=8": ("dp=4 sync_every=8", "ddp"),
    "dp=2 pp=2 bucket=4MB": ("dp=2 pp=2 schedule=1f1b microbatches=4 bucket=4M", "ddp+pp"),
}

# text on 4 ranks -> words of the message, of the hint
REFUSED = {
    "dp=3": (["do not multiply to the number of ranks", "dp 3 = 3 ranks, the world has 4"], "dp=4"),
    "tp=3": (["tp 3 = 3 ranks", "4 / 3 = 1.33 left for dp"], "1, 2, 4"),
    "pp=8": (["pp 8 = 8 ranks, the world has 4"], "1, 2, 4"),
    "dp=4 tp=2": (["dp 4 x tp 2 = 8 ranks, the world has 4"], "dp=2 tp=2"),
    "dp=1": (["dp 1 = 1 rank, the world has 4"], "dp=4"),
    "zero3 dp=2": (["dp 2 = 2 ranks, the world has 4"], "dp=4"),
    "dp=zero": (["'dp=zero' is not a degree", "whole number >= 1"], "dp=2"),
    "dp=0": (["not a degree"], "dp=2"),
    "tp=²": (["not a degree"], "tp=2"),
    "tp=": (["not a degree"], "tp=2"),
    "zero=4": (["no such ZeRO stage", "zero=4", "3 also parameters"], "zero=3"),
    "zero=-1": (["not a value of zero", "whole number >= 0"], "zero="),
    "data": (["'data' is not a preset", "zero3"], "ddp"),
    "cp": (["'cp' is not a preset"], "cp=2"),
    "zer3": (["'zer3' is not a preset"], "zero3"),
    "zbv": (["'zbv' is not a preset"], "pp schedule=zbv"),
    "pp micro_batches=8": (["'micro_batches' is not a key"], "microbatches=8"),
    "dp=4 ddp": (["a preset comes first"], "ddp"),
    "ddp zero3": (["'zero3' comes after the first word"], "zero3"),
    "tp=2 zero3": (["'zero3' comes after the first word"], "zero3 tp=2"),
    "ranks=4": (["'ranks' is not a key", "microbatches"], "dp=2"),
    "": (["empty"], "ddp"),
    "tp=2 tp=4": (["'tp' is given twice", "tp=2 and tp=4"], "tp=2"),
    "zero3 zero=1": (["'zero=1' contradicts 'zero3'"], "zero=1 without zero3"),
    "ddp zero=3": (["'zero=3' contradicts 'ddp'"], "zero=3 without ddp"),
    "hsdp zero=0": (["'zero=0' contradicts 'hsdp'"], "zero=0 without hsdp"),
    "zero3 shard=3": (["do not divide the data axis", "dp 4 / shard 3 = 1.33 groups"], "shard=2 or 4"),
    "hsdp shard=4": (["at least two groups", "dp 4 / shard 4 = 1 group"], "shard=2"),
    "hsdp tp=2": (["at least two groups", "no divisor"], "zero3"),
    "pp schedule=fast": (["'fast' is not a schedule", "dualpipev"], "1f1b"),
    "pp microbatches=0": (["'microbatches=0' is not a value of microbatches"], "microbatches=2"),
    "ddp compress=int4": (["'compress=int4' is not a format", "bf16 int8"], "compress=int8"),
    "ddp bucket=big": (["'bucket=big' is not a size"], "bucket=25M"),
    "tp tp_chunks=0": (["'tp_chunks=0' is not a value of tp_chunks", ">= 1"], "tp_chunks=2"),
    "ddp sync_every=0": (["'sync_every=0' is not a number of steps"], "sync_every=8"),
    "zero3 bucket=4M": (["zero3 has no buckets"], "zero2 bucket=4M"),
    "zero3 compress=int8": (["hold the whole model", "zero=3"], "dp=4 compress=int8"),
    "zero1 sync_every=8": (["hold the whole model", "zero=1"], "dp=4 sync_every=8"),
    "tp compress=int8": (["two or more data parallel ranks", "dp 1 of 4 ranks"], "dp=4 compress=int8"),
    "pp=2 sync_every=4": (["hold the whole model", "dp 2 of 4 ranks"], "dp=4 sync_every=4"),
    "ddp sync_every=4 compress=int8": (["no gradients are sent"], "sync_every=4, or compress=int8"),
    "pp schedule=dualpipev microbatches=7": (["at least 2 x pp 4 = 8, 7 given"], "microbatches=8"),
}


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def constructed(world_size: int) -> Iterator[Strategy]:
    """Yield every strategy that can be made from fields."""
    for dp, tp, pp, cp in product(range(1, world_size + 1), repeat=4):
        if dp * tp * pp * cp != world_size:
            continue
        for zero, shard, schedule in product(range(4), divisors(dp), SCHEDULES):
            yield Strategy(dp, tp, pp, cp, zero, shard, schedule)


@pytest.mark.parametrize("text", ON_FOUR)
def test_every_spelling_of_a_strategy_has_one_canonical_form(text: str) -> None:
    canonical, label = ON_FOUR[text]

    strategy = Strategy.parse(text, 4)

    assert (str(strategy), strategy.label) == (canonical, label)
    assert Strategy.parse(canonical, 4) == Strategy.parse(strategy, 4) == strategy
    assert strategy.mesh.size == 4


@pytest.mark.parametrize("text", REFUSED)
def test_an_impossible_strategy_is_refused_with_reason_and_hint(text: str) -> None:
    words, hint = REFUSED[text]

    with pytest.raises(StrategyError) as raised:
        Strategy.parse(text, 4)

    assert [word for word in words if word not in str(raised.value)] == []
    assert hint in raised.value.hint


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, pytest.param(12, marks=pytest.mark.long)])
def test_parsing_a_printed_strategy_gives_the_same_strategy(world_size: int) -> None:
    seen: dict[str, Strategy] = {}
    for strategy in constructed(world_size):
        for microbatches in (None, 1, strategy.pp, 4 * strategy.pp, 4 * strategy.pp + 1):
            try:
                strategy = replace(strategy, microbatches=microbatches)
            except StrategyError:
                continue
            assert Strategy.parse(str(strategy), world_size) == strategy
            assert Strategy.parse(str(strategy), world_size).without_effect == ()
            assert seen.setdefault(str(strategy), strategy) == strategy


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12])
def test_strategy_every_returns_each_strategy_once_and_simple_ones_first(world_size: int) -> None:
    offered = Strategy.every(world_size)

    plain = {s for s in constructed(world_size) if s.shard == s.dp or s.zero == 3}
    assert len(offered) == len(set(offered))
    assert set(offered) == plain
    assert offered[0] == Strategy(dp=world_size)
    splits = [(s.cp > 1, sum(n > 1 for n in (s.dp, s.tp, s.pp, s.cp))) for s in offered]
    assert splits == sorted(splits)


def test_strategy_every_can_be_limited_to_some_schedules_without_cp() -> None:
    offered = [s.label for s in Strategy.every(4, schedules=("1f1b",), cp=False)]

    alone = "ddp zero1 zero2 zero3 hsdp tp pp"
    hybrid = "ddp+tp zero1+tp zero2+tp zero3+tp ddp+pp zero1+pp zero2+pp zero3+pp tp+pp"
    assert " ".join(offered) == f"{alone} {hybrid}"


@pytest.mark.parametrize(
    ("text", "world_size", "node", "shard"),
    [
        ("hsdp", 16, 8, 8),  # a node
        ("hsdp", 16, None, 8),  # node unknown: the least memory that still replicates
        ("hsdp", 8, 8, 4),  # one node holds all of dp
        ("hsdp", 8, 3, 2),  # the most that divide dp and fit
        ("hsdp tp=2", 16, 8, 4),  # tp takes half of the node
        ("hsdp tp=2", 16, 2, 4),  # a node holds no two neighbours of dp
        ("hsdp shard=2", 16, 8, 2),
    ],
)
def test_hsdp_shards_within_a_node(text: str, world_size: int, node: int | None, shard: int) -> None:
    assert Strategy.parse(text, world_size, node=node).shard == shard


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ddp schedule=1f1b", ["schedule=1f1b has no effect with pp=1"]),
        ("ddp microbatches=8 shard=2", ["shard=2 has no effect with zero=0", "microbatches=8 has no effect with pp=1"]),
        ("zero3 tp=4", ["zero=3 has no effect with dp=1"]),
        ("zero3 shard=1", ["zero=3 has no effect with shard=1"]),
        ("zero3 pp=2", []),
        ("ddp bucket=25M sync_every=1", ["bucket=25M has no effect", "sync_every=1 has no effect"]),
        ("ddp tp_chunks=4", ["tp_chunks=4 has no effect with tp=1: no layer is split"]),
        ("tp tp_chunks=1", ["tp_chunks=1 has no effect because the whole output"]),
    ],
)
def test_a_setting_without_effect_is_named_and_set_to_neutral(text: str, words: list[str]) -> None:
    strategy = Strategy.parse(text, 4)

    assert len(strategy.without_effect) == len(words)
    assert [w for w, note in zip(words, strategy.without_effect, strict=True) if not note.startswith(w)] == []
    assert strategy == Strategy.parse(str(strategy), 4)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp"])
def test_every_preset_runs_on_one_rank(preset: str) -> None:
    assert Strategy.parse(preset, 1) == Strategy() and str(Strategy.parse(preset, 1)) == "dp=1"


def test_a_strategy_for_another_world_size_is_refused() -> None:
    with pytest.raises(StrategyError, match="dp 2 x tp 2 = 4 ranks, the world has 8"):
        Strategy.parse(Strategy(dp=2, tp=2), 8)


def test_a_strategy_is_frozen_and_validated_at_creation() -> None:
    assert Strategy(dp=2, tp=2, pp=2).mesh == Mesh(pp=2, dp=2, tp=2)
    with pytest.raises(FrozenInstanceError):
        Strategy(dp=2).dp = 3  # type: ignore[misc]
    for wrong in ({"dp": 0}, {"zero": 4}, {"dp": 4, "zero": 3, "shard": 3}, {"pp": 2, "schedule": "x"}, {"cp": -1}):
        with pytest.raises(StrategyError):
            Strategy(**wrong)  # type: ignore[arg-type]


def test_an_axis_unknown_to_a_technique_is_refused_with_a_reason() -> None:
    for axis in techniques.DEGREES.values():
        with pytest.raises(
            StrategyError, match=rf"{axis.technique} splits .*together with xp(.|\n)*{axis.name} goes with"
        ):
            axis.refuse({axis.name: 2, "xp": 2})
    unknown = techniques.Axis("xp", "A new axis", "something else", missing="ranks have no engine for it")
    with pytest.raises(StrategyError, match="A new axis cannot run yet: ranks have no engine"):
        unknown.refuse({"xp": 4})


def test_expert_parallelism_splits_the_data_axis() -> None:
    assert str(Strategy.parse("ep=2", 4)) == "dp=4 ep=2"
    assert str(Strategy.parse("zero3 ep=4", 8)) == "dp=8 zero=3 ep=4"
    assert Strategy.parse("zero3 ep=1", 4) == Strategy.parse("zero3", 4)
    assert Strategy(4, ep=2).label == "ddp+ep"
    refused = {
        "ep=3": r"dp 4 / ep 3 = 1.33 groups(.|\n)*ep=2 or 4",
        "ep=2 compress=bf16": r"ep=2: a rank holds only a part",
    }
    for text, said in refused.items():
        with pytest.raises(StrategyError, match=said):
            Strategy.parse(text, 4)
    assert {s.ep for s in Strategy.every(4)} == {1}
    assert [str(s) for s in Strategy.every(4, experts=True) if s.ep > 1] == [
        *(f"dp=4 {zero}ep={ep}" for ep in (2, 4) for zero in ("", "zero=3 "))
    ]
