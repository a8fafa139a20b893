"""Test that a strategy that does not fit is refused with the arithmetic, and that an uneven one gets a remark."""

from __future__ import annotations

import pytest

from nbkit.errors import StrategyError
from nbkit.planner.job_facts import Facts
from nbkit.planner.validate import refuse, validate
from nbkit.strategy import Strategy

# name -> (strategy, number of ranks, facts, what the message says, what to type)
CANNOT = {
    "heads": (
        "tp",
        4,
        Facts(heads=6),
        ["6 heads cannot be divided by 4 ranks", "6 heads / tp 4 = 1.5"],
        "tp=1, 2, 3 or 6",
    ),
    "kv heads": ("tp", 4, Facts(heads=8, kv_heads=2), ["2 key and value heads / tp 4 = 0.5"], "tp=1 or 2"),
    "vocabulary": ("tp", 4, Facts(vocab=3), ["3 rows of the embedding over tp 4 = 1+1+1+0"], "tp=3"),
    "world": (
        Strategy(dp=2, tp=4),
        8,
        Facts(world=4),
        ["needs more ranks than there are", "dp 2 x tp 4 = 8 ranks"],
        "ddp",
    ),
    "blocks": ("pp", 4, Facts(blocks=3), ["too few blocks", "pp 4 x 1 stage a rank = 4 stages, 3 blocks"], "pp=3"),
    "virtual blocks": (
        *("pp schedule=zbv", 4, Facts(costs=(1.0,) * 7)),
        *(["pp 4 x 2 stages a rank = 8 stages, 7 blocks"], "pp=3 or fewer or schedule=1f1b"),
    ),
    "batch": ("ddp", 3, Facts(batch=64), ["batch_size 64 / dp 3 = 21.3 rows"], "batch_size=66 or 63"),
    "small batch": ("ddp", 4, Facts(batch=2), ["smaller than the data axis", "2 / dp 4 = 0.5"], "batch_size=4"),
    "rows": (
        *("dp=2 pp=2 microbatches=8", 4, Facts(batch=8)),
        *(["more micro-batches than rows", "batch_size 8 / dp 2 = 4 rows per pipeline, 8 micro"], "microbatches=4"),
    ),
    "sequence": (
        "cp=4",
        4,
        Facts(sequence=3),
        ["some ranks would get no part", "3 positions over cp 4 = 1+1+1+0"],
        "cp=3",
    ),
}

# name -> (strategy, number of ranks, facts, what the remark says)
SHOWN = {
    "vocabulary": (
        "tp",
        2,
        Facts(vocab=99),
        ["vocabulary is cut unevenly", "99 rows of the embedding over tp 2 = 50+49"],
    ),
    "sequence": ("tp", 2, Facts(sequence=7), ["7 positions between the blocks over tp 2 = 4+3"]),
    "blocks": ("pp", 4, Facts(blocks=10), ["10 blocks in 4 stages = 3+3+2+2", "1.2 x the mean"]),
    "costs": ("pp", 2, Facts(costs=(3.0, 1.0, 1.0)), ["3 blocks in 2 stages = 1+2", "1.2 x the mean"]),
    "few micro-batches": (
        "pp microbatches=2",
        4,
        Facts(),
        ["2 micro-batches, pp 4", "3/5 = 60% of a gpipe or 1f1b step is idle"],
    ),
    "one micro-batch": (
        "pp microbatches=1",
        4,
        Facts(),
        ["1 micro-batch, pp 4", "3/4 = 75% of a gpipe or 1f1b step is idle"],
    ),
    "rounds": ("pp schedule=interleaved microbatches=6", 4, Facts(), ["6 micro-batches / pp 4 = 1.5 rounds"]),
    "rows": ("pp microbatches=8", 4, Facts(batch=60), ["60 rows per pipeline, in 8 micro-batches of 8 and 7"]),
    "context": ("cp=2", 2, Facts(sequence=9), ["9 positions over cp 2 = 5+4"]),
    "node": ("tp", 4, Facts(node=2), ["crosses nodes", "2 ranks of a node / tp 4 = 0.5"]),
    "without effect": ("ddp schedule=zb", 4, Facts(), ["schedule=zb has no effect with pp=1"]),
}

FITS = Facts(
    heads=8, kv_heads=4, width=64, vocab=96, blocks=8, costs=(2.0,) * 8, sequence=128, batch=64, world=4, node=4
)


@pytest.mark.parametrize("name", CANNOT)
def test_a_strategy_that_cannot_run_is_refused_with_the_numbers(name: str) -> None:
    text, world_size, facts, words, hint = CANNOT[name]

    with pytest.raises(StrategyError) as raised:
        refuse(Strategy.parse(text, world_size), facts)

    assert [word for word in words if word not in str(raised.value)] == []
    assert hint in raised.value.hint


@pytest.mark.parametrize("name", SHOWN)
def test_a_strategy_that_runs_unevenly_gets_a_remark(name: str) -> None:
    text, world_size, facts, words = SHOWN[name]

    (finding,) = refuse(Strategy.parse(text, world_size), facts)

    assert [word for word in words if word not in str(finding)] == []


@pytest.mark.parametrize("strategy", [s for s in Strategy.every(4) if s.schedule != "gpipe"], ids=str)
def test_a_strategy_that_fits_has_no_findings(strategy: Strategy) -> None:
    assert validate(strategy, FITS) == []


@pytest.mark.parametrize("strategy", Strategy.every(8), ids=str)
def test_unknown_facts_give_no_findings(strategy: Strategy) -> None:
    assert validate(strategy, Facts()) == []


def test_all_findings_are_listed_with_errors_before_remarks() -> None:
    facts = Facts(heads=6, kv_heads=3, vocab=99, blocks=3, batch=7)

    found = validate(Strategy(dp=2, tp=4, pp=2, microbatches=1), facts)

    assert [finding.error for finding in found] == [True, True, True, False, False, False]
