"""The fast part of the parity: each kind of strategy equals one process, to the last digits of float64.

All of it, every strategy on every model and for 50 steps: make parity. Here each family, schedule and extra is in one
cell at least, mostly with others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ranks import run_ranks

from parity.bf16 import bars_of_bf16
from parity.cells import EXTRAS, FAMILIES, Cell, extra_cells, matrix
from parity.figures import BARS, compared
from parity.rounds import in_lanes, looped, results, trained, truths

pytestmark = pytest.mark.timeout(300)


def _off(cells: Sequence[Cell], num_ranks: int) -> list[str]:
    """What is not as one process, with all cells in one set of processes."""
    known = truths(cells)
    ranks = run_ranks(trained, num_ranks, cells, timeout=240)
    off = []
    for i, cell in enumerate(cells):
        bars = bars_of_bf16(cell, fewer=True) if "bf16" in cell.extras else BARS[cell.dtype]
        figures = compared([rank[i] for rank in ranks], known[cell.truth])
        if missed := figures.missed(bars):
            off.append(f"{cell}: {missed} {figures}")
    return off


def _with(subject: str, strategy: str, *extras: str, dtype: str = "float64") -> Cell:
    return Cell(subject, strategy, dtype, 2, frozenset(extras))


SMALL = [*(Cell("gpt", strategy, steps=2) for strategy in ("hsdp", "cp=4", "zero=3 dp=2 tp=2"))]

SCHEDULES = [
    Cell("gpt", "pp schedule=dualpipev", steps=2),
    _with("encoder", "zero3", "dropout", "clip", "ragged"),
    _with("gpt_tied", "pp schedule=interleaved", "dropout", "clip", "recompute"),
    _with("gpt_tied", "tp", "dropout", "mask", "accumulate", dtype="float32"),
]

DEAR = [
    _with("gpt2", "dp=2 pp=2 schedule=zbv", "dropout", "mask", "ragged"),
    _with("llama_tied", "tp=2 pp=2", "mask", "clip", "recompute"),
    Cell("gpt", "dp=2 tp=2", "float32", 3, frozenset({"bf16"})),
    Cell("gpt", "dp=2 tp=2 pp=2", steps=2),
]


def test_the_families_on_four_ranks() -> None:
    assert _off(SMALL, 4) == []


@pytest.mark.long
def test_schedules_and_what_comes_besides() -> None:
    assert _off(SCHEDULES, 2) == []


# In tests/rank/parallel: unmodified models in jobs, test_fine_tuning.py; a step on eight ranks, test_whole_step.py.
# Half precision beside one process: tests/rank/train/step/test_precision.py.
@pytest.mark.long
def test_unmodified_models_bfloat16_and_three_axes() -> None:
    *on_four, three_axes = DEAR
    assert _off(on_four, 4) == []
    assert _off([three_axes], 8) == []


def test_a_loop_around_prepare_trains_the_same() -> None:
    cells = [_with("gpt_tied", "pp schedule=zbv", "dropout", "clip", "mask", "ragged")]
    known = truths(cells)

    for losses in run_ranks(looped, 2, cells, timeout=240):
        for found, cell in zip(losses, cells, strict=True):
            assert found == pytest.approx(known[cell.truth].losses, rel=BARS["float64"].losses)


def test_the_matrix_leaves_nothing_out() -> None:
    cells = [*matrix("float64", 50)]
    by_model = {name: {cell.strategy for cell in cells if cell.subject == name} for name in {c.subject for c in cells}}
    every = {strategy for family in FAMILIES.values() for strategy in family}

    assert by_model.pop("ten_convs") == {"ddp", "zero3", "pp=5 microbatches=8", "dp=2 pp=2"}
    assert sorted(by_model) == ["encoder", "gpt", "gpt2", "llama", "llama_tied"]
    assert all(strategies == every for strategies in by_model.values())
    besides = {(cell.strategy, extra) for cell in extra_cells("float64", 6) for extra in cell.extras}
    for words in (("ddp", "zero", "hsdp"), ("tp",), ("pp",), ("dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2"), ("cp",)):
        assert set(EXTRAS) == {extra for strategy, extra in besides if any(word in strategy for word in words)}


def test_a_cell_that_is_refused_or_breaks_takes_no_other_with_it() -> None:
    cells = [Cell("gpt", strategy, steps=1) for strategy in ("tp=3 dp=2", "ddp")]
    broken = Cell("no such model", "ddp", steps=1)

    (_, refused), (_, broke), (_, found) = results([cells[0], broken, cells[1]])

    assert isinstance(refused, str) and refused.startswith("refused: StrategyError")
    assert isinstance(broke, str) and "KeyError" in broke
    assert isinstance(found, list) and len(found[0].losses) == 1


@pytest.mark.long
def test_a_cell_that_does_not_end_is_ended() -> None:
    ((_, ended),) = results([Cell("gpt", "ddp", steps=500)], patience=1)

    assert isinstance(ended, str) and "the process ended without an answer" in ended


# In one process: tests/rank/parallel/pipeline/test_stages.py.
@pytest.mark.long
def test_ten_convolutions_in_five_stages_of_two() -> None:
    cell = Cell("ten_convs", "pp=5 microbatches=8", steps=2)
    ((_, ranks),) = in_lanes([cell], lanes=1)

    assert isinstance(ranks, list)
    held = [{int(name.split(".")[1]) for name in rank.weights if name.startswith("convs")} for rank in ranks]
    assert held == [{2 * i, 2 * i + 1} for i in range(5)]
    assert compared(ranks, truths([cell])[cell.truth]).missed(BARS["float64"]) == []
