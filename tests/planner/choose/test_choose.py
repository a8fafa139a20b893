"""Test the planner's choices, refusals and explanations on models and hardware with known answers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from nbkit.errors import UsageError
from nbkit.notebook.planning import explain, plan, planned
from nbkit.planner.choose.load import Hardware, Known, Rates, calibrated, lines_of, load_of, rest_of, seconds
from nbkit.planner.choose.search import _candidates, _peak, search, undecided
from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.job_facts import Weight
from nbkit.planner.peak import GPTPieces
from nbkit.planner.traffic import ADAM, TrafficTerm, per_step, wire_bytes
from nbkit.strategy import Strategy
from nbkit.trainer_options import RECOMPUTE

SMALL = GPTConfig(vocab=50304, block=1024, layers=12, heads=12, width=768)
SEVEN = GPTConfig(vocab=32000, block=4096, layers=32, heads=32, width=4096)
GPT3 = GPTConfig(vocab=50304, block=2048, layers=96, heads=96, width=12288)


def test_hardware_is_parsed_from_a_line() -> None:
    one = Hardware.parse("128 x 8 H100")
    assert (one.nodes, one.node, one.devices, one.device.memory) == (128, 8, 1024, 80e9)
    assert Hardware.parse("8 a100").nodes == 1
    assert Hardware.parse("2 x 8 H100 net=400Gbit/s").device.far == 50e9
    for wrong in ("8 abacus", "H100", "0 x 8 H100", "8 H100 net=fast", "12 H100"):
        with pytest.raises(UsageError):
            Hardware.parse(wrong)


@pytest.mark.parametrize(
    ("line", "nodes", "node", "told"),
    [
        ("2 T4", 1, 2, "2 T4"),
        ("64 H100", 8, 8, "8 x 8 H100"),
        ("1 x 64 H100", 1, 64, "1 x 64 H100"),
        ("2 x 6 H100", 2, 6, "2 x 6 H100"),
    ],
)
def test_devices_beyond_one_node_spread_over_nodes_unless_the_line_says_otherwise(
    line: str, nodes: int, node: int, told: str
) -> None:
    on = Hardware.parse(line)
    assert (on.nodes, on.node, str(on)) == (nodes, node, told)
    assert Hardware.parse(str(on)) == on


def test_a_model_that_fits_on_one_device_gets_plain_data_parallelism() -> None:
    best = plan(SMALL, batch=64, on="8 A100").rows[0]
    assert Strategy.parse(best.strategy, 8).dp == 8
    assert not best.recompute
    assert best.low <= best.seconds <= best.high
    assert best.peak.total < 80e9
    assert best.rate == pytest.approx(64 * 1024 / best.seconds)


def test_a_7b_model_on_eight_devices_is_sharded_and_dp_is_refused_with_the_sum() -> None:
    made = plan(SEVEN, batch=128, on="8 H100")
    best = Strategy.parse(made.rows[0].strategy, 8)
    assert best.zero >= 2 and best.tp == 1
    assert all(row.peak.total <= made.usable for row in made.rows)
    assert all(later.seconds >= 0.98 * earlier.seconds for earlier, later in pairwise(made.rows))
    whole = next(one for one in made.refused if one.strategy == "dp=8")
    assert "parameters 26.9 GB + gradients 26.9 GB + optimizer 53.8 GB > 73.6 GB" in whole.numbers
    assert not {row.strategy for row in made.rows} & {one.strategy for one in made.refused}


def test_recomputation_is_chosen_only_if_nothing_cheaper_fits() -> None:
    subject, on, strategy = GPTPieces(SEVEN, element=2), Hardware.parse("8 H100"), Strategy.parse("dp=8 zero=3", 8)
    facts, found = subject.facts(8), {}
    for candidate in _candidates(strategy, 8, 32):
        known = Known(subject.recomputing(candidate.recompute))
        load = load_of(known, candidate, facts)
        took = seconds(load, strategy, on, Rates())
        found[candidate.recompute] = _peak(known, candidate, rest_of(known, strategy)), took.compute, load.sent
    plain, part, whole = (found[how] for how in RECOMPUTE)
    # The part that selective recomputes is limited by memory, so it is cheap. A whole forward adds a third.
    assert 1 < part[1] / plain[1] < 1.1 and whole[1] / plain[1] == pytest.approx(4 / 3)
    assert plain[2] == part[2] == whole[2]
    sizes = [one[0].activations for one in (plain, part, whole)]
    assert 0.55 < sizes[1] / sizes[0] < 0.7 and sizes[2] / sizes[0] < 0.2
    for fitting, expected in ((plain, False), (part, "selective"), (whole, True)):
        made = search(subject, 8, on, memory=fitting[0].total)
        assert next(row.recompute for row in made.rows if row.strategy == str(strategy)) == expected
    assert "dp=8 zero=3 recompute=selective" in repr(search(subject, 8, on, memory=part[0].total))
    # Under tp, only the recomputation of whole blocks sends hidden states again.
    split, sent = Strategy.parse("tp=8", 8), {}
    for candidate in (one for one in _candidates(split, 8, 32) if one.micros == 1):
        sent[candidate.recompute] = load_of(Known(subject), candidate, facts).sent["tp"]
    assert sent[False] == sent["selective"] < sent[True]


def test_the_largest_model_keeps_tp_within_a_node_and_has_a_pipeline() -> None:
    best = Strategy.parse(plan(GPT3, batch=2048, on="128 x 8 H100").rows[0].strategy, 1024)
    assert 1 < best.tp <= 8 and best.pp > 1
    assert plan(GPT3, batch=64, on="8 H100").rows == ()
    assert "Nothing fits" in repr(plan(GPT3, batch=64, on="8 H100"))


def test_a_slower_network_changes_the_best_strategy() -> None:
    fast, slow = (plan(SEVEN, batch=64, on=f"4 x 8 H100 net={speed}GB/s").rows[0] for speed in (50, 0.5))
    assert slow.seconds > fast.seconds
    assert Strategy.parse(slow.strategy, 32) != Strategy.parse(fast.strategy, 32)


def test_explain_compares_two_rows_and_names_what_would_change_the_choice() -> None:
    made = plan(SEVEN, batch=128, on="8 H100")
    first, second = made.rows[0].settings, made.rows[-1].settings
    words = repr(explain(SEVEN, first, second, batch=128, on="8 H100"))
    assert first in words and second in words and "peak" in words
    assert "with twice the devices: dp=" in words
    with pytest.raises(UsageError, match="refused"):
        made.why("dp=8", first)
    with pytest.raises(UsageError, match="no row"):
        made.why("dp=3", first)


@pytest.mark.parametrize(
    "text, element",
    [
        ("dp=8", 4),
        ("dp=8 zero=1", 2),
        ("dp=8 zero=3", 4),
        ("dp=8 zero=3", 2),
        ("dp=8 zero=3 shard=4", 4),
        ("dp=4 tp=2", 4),
        ("dp=4 cp=2", 4),
    ],
)
def test_the_bytes_of_each_axis_are_near_the_formulas_per_weight(text: str, element: int) -> None:
    config = GPTConfig(vocab=512, block=256, layers=4, heads=8, width=64)
    subject, strategy = GPTPieces(config, element), Strategy.parse(text, 8)
    known, facts = Known(subject), subject.facts(32)
    candidate = next(one for one in _candidates(strategy, 32, 4) if one.micros == 1 and not one.recompute)
    weights = [
        Weight(
            f"{i}.{j}",
            (size // 4,),
            blocks=(i,),
            summed=("cp",) if j < len(piece.inside) else (),
            gathered=element if j < 6 or (i == 3 and size == piece.outside[-1]) else None,  # linear layers and the head
        )
        for i, piece in enumerate(subject.weights(strategy.tp, strategy.cp))
        for j, size in enumerate((*piece.inside, *piece.outside))
    ]
    terms = per_step(weights, facts, strategy, 0, each=ADAM)
    for axis, size in load_of(known, candidate, facts).sent.items():
        # The difference is losses, roots that are gathered once, and gradients of norms.
        assert size == pytest.approx(wire_bytes(terms, axis), rel=0.12), axis


def test_the_last_stage_has_the_head_and_makes_the_step_longer() -> None:
    subject, on = GPTPieces(SMALL, element=2), Hardware.parse("4 A100")
    known, facts = Known(subject), subject.facts(64)
    strategy = Strategy.parse("pp", 4)
    candidate = next(one for one in _candidates(strategy, 64, 12) if not one.recompute and one.rows == 1)
    load = load_of(known, candidate, facts)
    block, head = 12 * 768**2 + 1024 * 768, 50304 * 768
    assert subject.costs() == (block,) * 11 + (block + head,)
    cuts = ([0, *inner, 12] for inner in combinations(range(1, 12), 3))
    least = min(max(sum(subject.costs()[a:b]) for a, b in pairwise(at)) for at in cuts)
    # A training divides them into 4 + 4 + 3 + 1 blocks. With equal numbers, the last stage would have two more.
    assert max(load.stages) == pytest.approx(least / (12 * block + head)) and least == block + head
    assert list(load.stages[:3]) == pytest.approx([n * block / (12 * block + head) for n in (4, 4, 3)])
    parts = seconds(load, candidate.strategy, on, Rates())
    even = seconds(replace(load, stages=[0.25] * 4), candidate.strategy, on, Rates())
    assert parts.compute / even.compute == pytest.approx(4 * load.stages[-1])
    assert parts.total > 1.1 * even.total


class Uneven(GPTPieces):
    """A model whose first half computes three times as long as its second."""

    def costs(self) -> tuple[float, ...]:
        half = self.config.layers // 2
        return (3.0,) * half + (1.0,) * half


def test_pipeline_memory_is_checked_at_the_stages_with_most_blocks_and_parameters() -> None:
    strategy, known = Strategy.parse("pp=4 microbatches=4", 4), Known(Uneven(SMALL))
    block, ends = known.weights(1, 1)[1].total, known.weights(1, 1)
    assert known.stages(strategy) == ((0, 2),)  # two blocks that cost 3; the last stage has six that cost 1
    assert known.ranges(strategy)[3] == ((6, 12),)
    assert known.held(strategy) == 5 * block + ends[-1].total > ends[0].total + block


def test_no_step_is_predicted_shorter_than_the_time_to_send_its_bytes() -> None:
    ddp = next(row for row in plan(SMALL, batch=64, on="4 x 1 A100 net=0.1GB/s").rows if row.strategy == "dp=4")
    best = Rates().links * (1 + Rates().spread)
    assert ddp.seconds > ddp.low >= ddp.sent["dp"] / (0.1e9 * best) > 10 * ddp.parts.compute


@pytest.mark.parametrize(
    ("text", "axis", "op", "links"),
    [
        ("dp=32 zero=3", "dp", "all_gather", 8),
        ("dp=16 tp=2 zero=2", "dp", "reduce_scatter", 4),
        ("dp=4 tp=8 zero=3", "dp", "all_gather", 1),
        ("dp=32 zero=3 shard=16", "shard", "all_gather", 8),
        ("dp=32 zero=3 shard=8", "replicate", "all_reduce", 1),
        ("dp=32 zero=3 shard=4", "replicate", "all_reduce", 2),
        ("dp=8 pp=4 microbatches=8", "pp", "send", 1),
    ],
)
def test_a_collective_uses_the_links_of_all_its_ranks_on_a_node_and_a_send_uses_one(
    text: str, axis: str, op: str, links: int
) -> None:
    on, strategy = Hardware.parse("4 x 8 H100 net=10GB/s"), Strategy.parse(text, 32)
    term = TrafficTerm(axis, op, {"dp": strategy.dp, "shard": strategy.shard, "pp": 2}.get(axis, 4), 1, 1 << 30, "")
    line = lines_of(strategy, on, Rates(links=1.0))(term)
    assert (line.wire, line.way.speed) == (1, links * 10e9)
    assert lines_of(strategy, replace(on, nodes=1, node=32), Rates(links=1.0))(term).way.speed == on.device.near


def test_one_measured_step_calibrates_the_rates() -> None:
    subject, on = GPTPieces(SMALL, element=2), Hardware.parse("8 A100")
    strategy = Strategy.parse("ddp", 8)
    known, facts = Known(subject), subject.facts(64)
    load = load_of(known, next(_candidates(strategy, 64, 12)), facts)
    rates = calibrated(load, strategy, on, 0.1)
    assert seconds(load, strategy, on, rates).total == pytest.approx(0.1, rel=1e-3)
    assert rates.spread < Rates().spread


def test_a_plan_shows_what_compression_saves_if_the_step_waits_for_a_link() -> None:
    slow, quick = (plan(SMALL, batch=64, on=f"4 x 1 A100 net={net}") for net in ("0.1GB/s", "100GB/s"))
    ddp = next(row for row in slow.rows if row.strategy == "dp=4")
    assert list(ddp.levers) == ["compress=bf16", "compress=int8", "sync_every=8"]
    assert ddp.seconds > ddp.levers["compress=bf16"] > ddp.levers["compress=int8"] > ddp.levers["sync_every=8"]
    # Only the waits shrink with the bytes.
    saved = ddp.seconds - ddp.levers["compress=int8"]
    assert 0.5 * saved < ddp.seconds - ddp.levers["compress=bf16"] < saved < ddp.parts.exposed
    assert "compress=int8 " in repr(slow) and "compress=int8 " in slow._repr_html_()
    assert not any(row.levers for row in quick.rows) and "compress" not in repr(quick)


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, nbkit; print(nbkit.plan(nbkit.GPTConfig(), batch=8, on='2 A100').rows[0].strategy)"
    done = subprocess.run(
        [sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dp=2")


def test_the_magic_plans_a_variable_of_the_notebook() -> None:
    asked = {"batch": 8, "on": "2 A100", "precision": "fp32", "why": None}
    made = planned({"config": GPTConfig()}, model="config", **asked)  # type: ignore[arg-type]
    assert repr(made) == repr(plan(GPTConfig(), batch=8, on="2 A100", precision=None))
    assert "<table>" in made._repr_html_()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="no variable 'other'"):
        planned({"config": 3}, model="other", **asked)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="this is a int"):
        planned({"config": 3}, model="config", **asked)  # type: ignore[arg-type]


def test_strategies_that_may_still_be_the_best_are_measured_again() -> None:
    def row(name: str, low: float, middle: float, high: float) -> dict[str, Any]:
        return {"strategy": name, "step_s": middle, "low_s": low, "high_s": high, "error": ""}

    rows = [row("ddp", 0.9, 1.0, 1.2), row("zero1", 0.8, 0.9, 0.95), row("zero3", 1.5, 1.6, 1.7)]
    assert undecided(rows, "ddp") == ["zero1"]  # the present strategy is part of each comparison
    assert undecided(rows, "zero3") == ["zero1", "ddp"]
    assert (
        undecided([row("ddp", 0.96, 1.0, 1.2), *rows[1:]], "ddp") == []
    )  # zero1 is the best, and ddp is measurably slower
    assert undecided([row("ddp", 0.9, 0.92, 1.2), *rows[1:]], "ddp") == []  # as good as the best
    assert undecided([{**row("tp", 0, 0, 0), "error": "no"}, {**rows[0], "low_s": None, "high_s": None}], "ddp") == []
