"""Test a sample of the table of models and strategies, and the code that judges a case.

`make zoo` runs every architecture under every strategy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nbkit.tensor_layout import Layout
from verify.__main__ import main
from verify.cases import CHAINED, EXPERTS_CHAINED, LONGEST, ZOO_STRATEGIES, optimizer_cases, zoo_case, zoo_cases
from verify.compare import judged, zoo_table, zoo_totals
from verify.optimizers import OPTIMIZERS
from verify.rank_sets import verdicts
from verify.training import ARCHITECTURES, Outcome, Truth

pytestmark = pytest.mark.timeout(180)

BEFORE, AFTER = {"weight": torch.zeros(3)}, {"weight": torch.ones(3)}
GRADS = {"weight": torch.ones(3)}
KNOWN = Truth(
    [2.0] * LONGEST,
    [1.0] * LONGEST,
    GRADS,
    {0: BEFORE} | dict.fromkeys(range(1, LONGEST + 1), AFTER),
    False,
    {"tp=2": ("fits", ""), "ddp": ("fits", "")},
)
PIECES = {"weight": (torch.ones(3), Layout.whole((3,)))}
EQUAL = Outcome([2.0] * 3, [1.0] * 3, PIECES, AFTER, 3)
SINGLE = zoo_case("some", "tp=2")


def test_sampled_cases_equal_one_process_or_are_refused_as_check_predicts() -> None:
    chosen = [
        zoo_case("dit", "tp=2 > pp=2"),
        zoo_case("unet", "cp=2"),
    ]
    found = dict(verdicts(chosen, lanes=1, check=True))

    assert {case: verdict.kind for case, verdict in found.items()} == dict(
        zip(chosen, ("equal", "refused"), strict=True)
    )
    assert not any(verdict.is_wrong for verdict in found.values()), found


def test_the_zoo_has_thirty_architectures_eight_strategies_and_a_chain() -> None:
    assert len(ARCHITECTURES) >= 30
    assert [case.strategy for case in zoo_cases(["gpt2"])] == [*ZOO_STRATEGIES, CHAINED]
    assert [case.strategy for case in zoo_cases(["gpt2", "llama"], ["gpt2", "tp"])] == ["tp=2", "dp=2 tp=2"]
    assert [case.strategy for case in zoo_cases(["gpt2"], ["chain"])] == [CHAINED]


def test_mixtures_have_cases_with_ep_and_each_other_axis_and_a_chain() -> None:
    cases = list(zoo_cases(tuple(ARCHITECTURES), ["ep"]))
    assert len(cases) == 8 * 7 and {case.ranks for case in cases} == {4}
    assert [case.strategy for case in zoo_cases(["olmoe"], ["chain"])] == [CHAINED, EXPERTS_CHAINED]
    assert not list(zoo_cases(["llama"], ["ep"]))
    verdict = judged(cases[0], "a traceback", KNOWN)
    assert zoo_table({cases[0]: verdict, zoo_case("gpt2", "ddp"): verdict})[6].startswith("| model | ep=4 | ep=2 |")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_sampled_expert_cases_equal_one_process_or_are_refused() -> None:
    chosen = {
        zoo_case("deepseek_v3", "cp=2 ep=2"): "equal",  # its router rounds to float32, differently when split
        zoo_case("gpt_oss", "tp=2 ep=2"): "equal",
        zoo_case("qwen3_moe", "pp=2 ep=2"): "equal",
        zoo_case("moe_by_hand", EXPERTS_CHAINED): "equal",
        zoo_case("deepseek_v2", "tp=2 ep=2"): "refused",
    }
    found = dict(verdicts(list(chosen), lanes=1, check=True))

    assert {case: verdict.kind for case, verdict in found.items()} == chosen
    assert not any(verdict.is_wrong for verdict in found.values()), found


def test_the_optimizer_table_has_thirteen_optimizers_under_thirteen_strategies() -> None:
    every = list(optimizer_cases(tuple(OPTIMIZERS)))
    assert len(every) == len(OPTIMIZERS) * 13 == 13 * 13
    assert [case.strategy for case in optimizer_cases(["soap"], ["soap", "chain"])] == [CHAINED]
    assert [case.strategy for case in optimizer_cases(["lion"], ["tp", "pp"])] == ["tp=2 pp=2"]
    assert every[0].truth != every[-1].truth and str(every[-1]).startswith("muon and adamw, ")
    columns = tuple(dict.fromkeys(case.strategy for case in every))
    table = zoo_table({every[0]: judged(every[0], "a traceback", KNOWN)}, [columns])
    assert table[0].startswith("| optimizer | ddp | zero1 |") and table[2].startswith("| adamw | **crash**")


@pytest.mark.long
@pytest.mark.parametrize("words", [("muon and adamw", "chain"), ("soap", "chain"), ("prodigy", "zero1")])
def test_sampled_optimizers_equal_one_process_or_are_refused(words: tuple[str, ...]) -> None:
    for case, verdict in verdicts(list(optimizer_cases(tuple(OPTIMIZERS), words)), lanes=1):
        assert verdict.kind == ("refused" if "prodigy" in words else "equal"), (case, verdict)
        if verdict.kind == "refused":
            assert "all parameters together: in each step one rank would get" in verdict.text


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (EQUAL, "equal"),
        (replace(EQUAL, losses=[2.0, 2.0, 2.0 + 1e-6]), "wrong"),
        (replace(EQUAL, state={"weight": torch.full((3,), 1 + 1e-6)}), "wrong"),
        (replace(EQUAL, state={"weight": torch.full((3,), float("nan"))}), "wrong"),
        (replace(EQUAL, losses=[2.0, float("nan"), 2.0]), "wrong"),
        (replace(EQUAL, state={}), "wrong"),
        (replace(EQUAL, norms=[1.0, 1.0, 1.0 + 1e-6]), "wrong"),
        (replace(EQUAL, norms=[]), "wrong"),
        (replace(EQUAL, grads={"weight": (torch.full((3,), 1 + 1e-6), Layout.whole((3,)))}), "wrong"),
        (replace(EQUAL, evaluated=(1.0,)), "wrong"),
        (replace(EQUAL, losses=[2.0] * 2, norms=[1.0] * 2, made=2), "wrong"),
        (Outcome(), "wrong"),
        (Outcome(refused={"tp=2": "no"}), "refused"),
        (Outcome(made=1, late="no"), "late"),
        ("a traceback", "crash"),
    ],
)
def test_a_case_is_judged_by_its_worst_rank(found: Outcome | str, kind: str) -> None:
    verdict = judged(SINGLE, found if isinstance(found, str) else [EQUAL if kind != "refused" else found, found], KNOWN)

    assert verdict.kind == kind
    assert bool(verdict.check) == (kind != "equal")


def test_weights_under_adamw_must_be_complete_and_finite_but_have_no_tolerance() -> None:
    case = replace(SINGLE, extras=frozenset[str]())

    def kind(**changed: Any) -> str:
        return judged(case, [replace(EQUAL, **changed)] * 2, KNOWN).kind

    assert kind() == kind(state={"weight": torch.full((3,), 1.5)}) == "equal"
    assert kind(state={}) == kind(state={"weight": torch.full((3,), float("nan"))}) == "wrong"
    assert kind(grads={}) == "wrong"  # on no rank


def test_a_refusal_by_some_ranks_and_a_different_evaluation_are_wrong() -> None:
    assert judged(SINGLE, [Outcome(refused={"tp=2": "no"}), Outcome()], KNOWN).kind == "wrong"
    evaluating = replace(KNOWN, evaluated=(1.0,))
    right, other = replace(EQUAL, evaluated=(1.0,)), replace(EQUAL, evaluated=(1.1,))
    assert [judged(SINGLE, [right, each], evaluating).kind for each in (right, other, EQUAL)] == [
        "equal",
        "wrong",
        "wrong",
    ]
    assert judged(SINGLE, [other, other], evaluating).kind == "wrong"


@pytest.mark.parametrize("what", ["parity", "zoo"])
def test_search_words_that_match_no_case_are_an_error(what: str) -> None:
    with pytest.raises(SystemExit, match="no case has all of these words: gtp"):
        main([what, "gtp"])


def test_models_that_round_to_float32_have_the_tolerance_of_float32() -> None:
    near = replace(EQUAL, losses=[2.0, 2.0, 2.0 + 1e-6])

    assert judged(SINGLE, [near], replace(KNOWN, rounds=True)).kind == "equal"


def test_a_chain_skips_refused_strategies_and_continues() -> None:
    chain = zoo_case("some", "ddp > tp=2")
    verdict = judged(chain, [Outcome([2.0] * 2, [1.0] * 2, PIECES, AFTER, 2, {"tp=2": "no"})] * 2, KNOWN)

    assert (verdict.kind, verdict.left_out) == ("equal", ("tp=2",))
    assert verdict.check == "tp=2: fits"
    assert "equal less tp=2 +check" in "\n".join(zoo_table({replace(chain, strategy=CHAINED): verdict}))
    assert zoo_totals({chain: verdict}).startswith(
        "1 cases: 1 equal, 0 refused, 0 wrong, 0 crash, 0 late (100 % equal)"
    )
