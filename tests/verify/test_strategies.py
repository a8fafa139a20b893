"""Test the fast part of `make parity`: each kind of strategy equals one process, to the last digits of float64.

`make parity` runs every strategy on every model for 50 steps. Here each family, schedule and extra is in at least one
case, usually together with others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ranks import run_ranks

from verify.cases import EXPERTS, EXTRAS, FAMILIES, MIXTURES, Case, parity_case, parity_extras, parity_matrix
from verify.compare import BARS, bars_of, compared
from verify.rank_sets import in_lanes, looped, results, trained, truths

pytestmark = pytest.mark.timeout(300)


def _off(cases: Sequence[Case], num_ranks: int) -> list[str]:
    """Return the cases that differ from one process. All cases run in one set of processes."""
    known = truths(cases)
    ranks = run_ranks(trained, num_ranks, cases, timeout=240)
    off = []
    for i, case in enumerate(cases):
        figures = compared(case, [rank[i] for rank in ranks], known[case.truth])
        if missed := figures.missed(bars_of(case, known[case.truth], fewer=True)):
            off.append(f"{case}: {missed} {figures}")
    return off


def _with(model: str, strategy: str, *extras: str, dtype: str = "float64") -> Case:
    return Case(model, strategy, dtype, 2, frozenset(extras))


SMALL = [
    *(Case("gpt", strategy, steps=2) for strategy in ("hsdp", "cp=4", "zero=3 dp=2 tp=2")),
    _with("gpt_tied", "cp=2 pp=2", "dropout", "recompute"),
    _with("gpt", "tp=2 pp=2", "dropout", "selective"),
    _with("gpt_frozen", "dp=2 pp=2 schedule=zbv", "sgd", "clip"),
    _with("lora", "tp=2 pp=2", "sgd", "clip"),
]

SCHEDULES = [
    Case("gpt", "pp schedule=dualpipev", steps=2),
    _with("encoder", "zero3", "dropout", "clip", "ragged"),
    _with("gpt_tied", "pp schedule=interleaved", "dropout", "clip", "recompute"),
    _with("gpt_tied", "tp", "dropout", "mask", "accumulate", dtype="float32"),
]

DEAR = [
    _with("gpt2", "dp=2 pp=2 schedule=zbv", "dropout", "mask", "ragged"),
    _with("llama_of_8_heads_tied", "tp=2 pp=2", "mask", "clip", "recompute"),
    _with("llama_of_8_heads_tied", "dp=2 tp=2 zero=3", "mask", "clip", "selective"),
    _with("gpt2", "cp=2 tp=2", "dropout", "selective"),
    Case("gpt", "dp=2 tp=2", "float32", 3, frozenset({"bf16"})),
    Case("gpt", "dp=2 tp=2 pp=2", steps=2),
]


FINE_TUNED = [
    *(_with("gpt_frozen", strategy, "sgd", "clip") for strategy in ("cp=2 tp=2", "zero1")),
    *(_with("llama_lora", strategy, "sgd", "clip") for strategy in ("zero=3 dp=2 tp=2", "dp=2 pp=2")),
]


@pytest.mark.parametrize("cases", [SMALL, pytest.param(FINE_TUNED, marks=pytest.mark.long)])
def test_every_family_on_four_ranks_equals_one_process(cases: list[Case]) -> None:
    assert _off(cases, 4) == []


@pytest.mark.long
def test_schedules_with_extras_equal_one_process() -> None:
    assert _off(SCHEDULES, 2) == []


# tests/rank/parallel/test_whole_step.py makes a step on eight ranks.
# tests/rank/train/step/test_precision.py compares half precision with one process.
@pytest.mark.long
def test_unmodified_models_bfloat16_and_three_axes_equal_one_process() -> None:
    *on_four, three_axes = DEAR
    assert _off(on_four, 4) == []
    assert _off([three_axes], 8) == []


def test_a_loop_around_prepare_equals_one_process() -> None:
    cases = [_with("gpt_tied", "pp schedule=zbv", "dropout", "clip", "mask", "ragged")]
    known = truths(cases)

    for losses in run_ranks(looped, 2, cases, timeout=240):
        for found, case in zip(losses, cases, strict=True):
            assert found == pytest.approx(known[case.truth].losses, rel=BARS["float64"].losses)


def test_the_matrix_has_every_model_strategy_and_extra() -> None:
    cases = [*parity_matrix("float64", 50)]
    by_model = {name: {case.strategy for case in cases if case.model == name} for name in {c.model for c in cases}}
    every = {strategy for family in FAMILIES.values() for strategy in family}

    assert [by_model.pop(name) for name in MIXTURES] == [set(EXPERTS)] * 2
    assert by_model.pop("ten_convs") == {"ddp", "zero3", "pp=5 microbatches=8", "dp=2 pp=2"}
    assert sorted(by_model) == ["encoder", "gpt", "gpt2", "llama_of_8_heads", "llama_of_8_heads_tied"]
    assert all(strategies == every for strategies in by_model.values())
    besides = {(case.strategy, extra) for case in parity_extras("float64", 6) for extra in case.extras}
    for words in (("ddp", "zero", "hsdp"), ("tp",), ("pp",), ("dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2"), ("cp",)):
        assert set(EXTRAS) == {extra for strategy, extra in besides if any(word in strategy for word in words)}


def test_a_refused_or_broken_case_does_not_stop_the_others() -> None:
    cases = [Case("gpt", strategy, steps=1, ranks=2) for strategy in ("tp=3", "ddp")]
    broken = Case("no such model", "ddp", steps=1, ranks=2)

    (_, refused), (_, broke), (_, found) = results([cases[0], broken, cases[1]])

    assert isinstance(refused, list) and [each.made for each in refused] == [0] * 2
    assert all([*each.refused] == ["tp=3"] and each.refused["tp=3"] for each in refused)
    assert isinstance(broke, str) and "KeyError" in broke
    assert isinstance(found, list) and len(found[0].losses) == 1


@pytest.mark.long
def test_a_case_that_does_not_end_is_killed() -> None:
    ((_, ended),) = results([Case("gpt", "ddp", steps=500)], patience=1)

    assert isinstance(ended, str) and "the process ended without an answer" in ended


# tests/rank/parallel/pipeline/test_stages.py tests this in one process.
@pytest.mark.long
def test_ten_convolutions_are_split_into_five_stages_of_two() -> None:
    case = parity_case("ten_convs", "pp=5 microbatches=8", steps=2)
    ((_, ranks),) = in_lanes([case], lanes=1)

    assert isinstance(ranks, list)
    held = [{int(name.split(".")[1]) for name in rank.grads if name.startswith("convs")} for rank in ranks]
    assert held == [{2 * i, 2 * i + 1} for i in range(5)]
    assert compared(case, ranks, truths([case])[case.truth]).missed(BARS["float64"]) == []
