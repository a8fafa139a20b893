"""A sample of the table of models and strategies, and the judge of it.

All of it, every architecture under every strategy: make zoo.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zoo.cells import CHAINED, STRATEGIES, Cell, cells
from zoo.rounds import verdicts
from zoo.training import LONGEST, SUBJECTS, Found, Known
from zoo.verdicts import judged, table, totals, wrong_with

pytestmark = pytest.mark.timeout(180)

BEFORE, AFTER = {"weight": torch.zeros(3)}, {"weight": torch.ones(3)}
KNOWN = Known(
    [2.0] * LONGEST,
    BEFORE,
    dict.fromkeys(range(1, LONGEST + 1), AFTER),
    False,
    {"tp=2": ("fits", ""), "ddp": ("fits", "")},
)
EQUAL = Found([2.0] * 3, AFTER, 3)
SINGLE = Cell("some", "tp=2")


def test_a_sample_of_cells_is_as_one_process_or_refused_and_check_says_the_same() -> None:
    chosen = [
        Cell("dit", "tp=2 > pp=2"),
        Cell("unet", "cp=2"),
    ]
    found = dict(verdicts(chosen, lanes=1))

    assert {cell: verdict.kind for cell, verdict in found.items()} == dict(
        zip(chosen, ("equal", "refused"), strict=True)
    )
    assert not any(map(wrong_with, found.values())), found


def test_the_table_has_thirty_architectures_eight_strategies_and_a_chain() -> None:
    assert len(SUBJECTS) >= 30
    assert [cell.strategy for cell in cells(["gpt2"])] == [*STRATEGIES, CHAINED]
    assert [cell.strategy for cell in cells(["gpt2", "llama"], ["gpt2", "tp"])] == ["tp=2", "dp=2 tp=2"]
    assert [cell.strategy for cell in cells(["gpt2"], ["chain"])] == [CHAINED]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (EQUAL, "equal"),
        (replace(EQUAL, losses=[2.0, 2.0, 2.0 + 1e-6]), "wrong"),
        (replace(EQUAL, after={"weight": torch.full((3,), 1 + 1e-6)}), "wrong"),
        (replace(EQUAL, after={"weight": torch.full((3,), float("nan"))}), "wrong"),
        (replace(EQUAL, losses=[2.0, float("nan"), 2.0]), "wrong"),
        (replace(EQUAL, after={}), "wrong"),
        (Found(refused={"tp=2": "no"}), "refused"),
        (Found(made=1, late="no"), "late"),
        ("a traceback", "crash"),
    ],
)
def test_a_cell_is_judged_by_its_worst_rank_and_check_has_to_have_said_so(found: Found | str, kind: str) -> None:
    verdict = judged(SINGLE, found if isinstance(found, str) else [EQUAL if kind != "refused" else found, found], KNOWN)

    assert verdict.kind == kind
    assert bool(verdict.check) == (kind != "equal")


def test_what_rounds_to_single_precision_has_the_bar_of_single_precision() -> None:
    near = replace(EQUAL, losses=[2.0, 2.0, 2.0 + 1e-6])

    assert judged(SINGLE, [near], replace(KNOWN, rounds=True)).kind == "equal"


def test_a_chain_trains_on_without_what_it_was_refused_and_check_is_asked_about_each() -> None:
    chain = Cell("some", "ddp > tp=2")
    verdict = judged(chain, [Found([2.0] * 2, AFTER, 2, {"tp=2": "no"})] * 2, KNOWN)

    assert (verdict.kind, verdict.left_out) == ("equal", ("tp=2",))
    assert verdict.check == "tp=2: fits"
    assert "equal less tp=2 +check" in "\n".join(table({replace(chain, strategy=CHAINED): verdict}))
    assert totals({chain: verdict}).startswith("1 cells: 1 equal, 0 refused, 0 wrong, 0 crash, 0 late (100 % equal)")
