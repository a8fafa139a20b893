"""Test tp_chunks, where the sum of a map overlaps with its product. Results and bytes equal those of a single sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from ranks import run_ranks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import nbkit
from nbkit.planner.job_facts import Facts
from nbkit.planner.traffic import per_step
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel.tensor import chunked_sum as module
from nbkit.rank.telemetry import collectives
from nbkit.strategy import Strategy
from nbkit.techniques.tp_chunks import num_pieces, pieces
from verify.cases import Case
from verify.compare import bars_of, compared
from verify.models.specimens import ZOO
from verify.models.tensor_odd import lora_llama
from verify.rank_sets import trained, truths
from verify.tensor_split import compared as tensor_split
from verify.tensor_split import specimen

pytestmark = pytest.mark.timeout(300)
CONFIG = GPTConfig(vocab=32, block=16, layers=2, heads=2, width=16)


def with_extras(model: str, strategy: str, *extras: str) -> Case:
    return Case(model, strategy, "float64", 2, frozenset(extras))


ON_FOUR = [
    with_extras("gpt", "dp=2 tp=2 tp_chunks=3"),
    with_extras("gpt", "tp=2 pp=2 tp_chunks=4", "selective", "dropout"),
]
ALSO_ON_FOUR = [
    with_extras("gpt", "zero=3 dp=2 tp=2 tp_chunks=2", "recompute", "clip"),
    with_extras("gpt", "cp=2 tp=2 tp_chunks=5", "ragged"),
    with_extras("gpt", "tp=2 pp=2 schedule=zbv tp_chunks=2"),
    with_extras("lora", "tp=2 pp=2 tp_chunks=3", "sgd"),
    with_extras("gpt2", "dp=2 tp=2 tp_chunks=40", "mask", "dropout"),
    Case("gpt", "dp=2 tp=2 tp_chunks=3", "float32", 3, frozenset({"bf16"})),
]
CHAIN = Case(
    "gpt",
    "tp=2 > tp=2 tp_chunks=3 > ddp > tp=2 tp_chunks=2 > zero1 > tp=2",
    steps=6,
    extras=frozenset({"sgd"}),
    ranks=2,
)


@pytest.mark.parametrize("cases", [ON_FOUR, pytest.param(ALSO_ON_FOUR, marks=pytest.mark.long)])
def test_trainings_with_tp_chunks_equal_one_process(cases: list[Case]) -> None:
    assert differing(cases, 4) == []


def test_switches_to_and_from_tp_chunks_keep_the_training_equal() -> None:
    assert differing([CHAIN], 2) == []


def differing(cases: Sequence[Case], ranks: int) -> list[str]:
    """Return the cases that differ from one process."""
    known, found = truths(cases), run_ranks(trained, ranks, cases, timeout=240)
    off = []
    for i, case in enumerate(cases):
        figures = compared(case, [rank[i] for rank in found], known[case.truth])
        if missed := figures.missed(bars_of(case, known[case.truth], fewer=True)):
            off.append(f"{case}: {missed} {figures}")
    return off


def gradients_off(world: Any, runs: list[tuple[str, dict[str, Any]]]) -> list[float]:
    return [specimen(world, name, **options)[0] for name, options in runs]


def test_gradients_of_rows_and_positions_that_do_not_divide_are_right() -> None:
    runs: list[tuple[str, dict[str, Any]]] = [
        ("gpt", {"chunks": 2, "length": 13}),  # three rows in two pieces; parts of 5 and 4 positions
        ("gpt", {"chunks": 8, "length": 13}),  # two pieces of each row
        ("gpt", {"chunks": 99, "length": 2}),  # more chunks than positions
        ("gpt", {"chunks": 7, "length": 5, "sequence": False}),
        ("uneven", {"chunks": 4}),
    ]
    for run, worst in zip(runs, run_ranks(gradients_off, 4, runs, timeout=150)[0], strict=True):
        assert worst <= 1e-9, run


def notes_with_lora(world: Any, targets: list[str]) -> tuple[float, tuple[str, ...]]:
    one = ZOO["llama"]
    value, target = one.batch(3, dtype=torch.float64)
    model = lora_llama(targets=targets)
    worst, _, split, _ = tensor_split(world, model, value, lambda out: one.loss(out, target), chunks=2)
    return worst, split.notes


@pytest.mark.parametrize(("targets", "notes"), [(["o_proj", "down_proj"], 1), (["o_proj"], 0)])
def test_a_note_says_that_tp_chunks_has_no_effect_with_lora_on_every_layer(targets: list[str], notes: int) -> None:
    for worst, said in run_ranks(notes_with_lora, 2, targets):
        assert worst <= 1e-9
        assert len([note for note in said if "tp_chunks=2 has no effect" in note]) == notes


def test_pieces_cover_every_row_and_position_once() -> None:
    for rows, length, chunks in ((8, 5, 3), (3, 5, 8), (2, 1, 9), (1, 16, 4), (4, 4, 1)):
        seen = torch.zeros(rows, length)
        for first, last, begin, end in pieces(rows, length, chunks):
            seen[first:last, begin:end] += 1
            assert seen[first:last, begin:end].is_contiguous()
        assert (seen == 1).all()
        assert num_pieces(rows, length, chunks) <= chunks


class Products(TorchDispatchMode):
    """A mode that adds "product" to a list for each product of matrices."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.said.append("product")
        return func(*args, **(kwargs or {}))


class Waited:
    def __init__(self, work: Any, said: list[str]) -> None:
        self.work, self.said = work, said

    def wait(self) -> None:
        self.said.append("wait")
        self.work.wait()


def in_which_order(world: Any, sequence: bool) -> tuple[list[str], list[str]]:
    said: list[str] = []

    def started(collective: Any, *args: Any, **kwargs: Any) -> Waited:
        said.append("send")
        return Waited(collective(*args, **kwargs), said)

    for home, name in ((module, "scatter_single"), (module, "gather_single"), (dist, "all_reduce")):
        setattr(home, name, partial(started, getattr(home, name)))
    x, weight = torch.randn(6, 4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    with Products(said):
        y = module.chunked_sum(x, weight, dist.group.WORLD, 3, sequence=sequence)  # type: ignore[arg-type]
        assert y is not None
        forward = said.copy()
        said.clear()
        y.sum().backward()
    return forward, said


@pytest.mark.parametrize("sequence", [False, True])
def test_the_next_product_starts_before_the_wait_for_a_collective(sequence: bool) -> None:
    for forward, backward in run_ranks(in_which_order, 2, sequence):
        assert forward == ["product", "send"] * 3 + ["wait"] * 3
        if sequence:
            # A piece is in flight during each product except the last. The gradient of the weight is one product.
            ahead = ["send", "wait", "product"]
            assert backward == ["send", *ahead, *ahead, "wait", "product", "product"]
        else:
            assert backward == ["product", "product"]


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def what_is_sent(world: Any, strategy: str, recompute: Any) -> dict[str, tuple[int, int]]:
    """Return (bytes, calls) of the second step along tp, by operation."""
    draw = torch.Generator().manual_seed(0)
    data = [tuple(torch.randint(32, (16,), generator=draw) for _ in range(2)) for _ in range(16)]
    trainer = quiet(
        model=lambda: GPT(CONFIG),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=data,
        strategy=strategy,
        compute=nbkit.Compute(recompute=recompute),
    )
    trainer.fit(1)
    begin = collectives.ring.end
    trainer.fit(1)
    calls = [call for call in collectives.ring.between(begin, collectives.ring.end)[0] if call.axis == "tp"]
    ops = {call.op for call in calls}
    return {op: (sum(c.bytes for c in calls if c.op == op), sum(c.op == op for c in calls)) for op in ops}


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long), "selective"])
def test_chunks_send_the_same_bytes_in_one_call_per_piece(recompute: Any) -> None:
    (plain, *_) = run_ranks(what_is_sent, 2, "tp=2", recompute)
    for found in run_ranks(what_is_sent, 2, "tp=2 tp_chunks=4", recompute):
        assert {op: size for op, (size, _) in found.items()} == {op: size for op, (size, _) in plain.items()}
        more = {op: calls - plain[op][1] for op, (_, calls) in found.items()}
        # There are two blocks of two pairs: outputs in forward, gradients in backward, in 4 pieces instead of 1.
        again = 2 * 3 if recompute is True else 0
        assert (more["reduce_scatter"], more["all_gather"]) == (4 * 3 + again, 4 * 3)


def test_the_planner_counts_the_calls_of_tp_chunks() -> None:
    facts = Facts(batch=8, sequence=16, width=16, blocks=2)
    plain, chunked = (
        {term.op: term for term in per_step([], facts, Strategy.parse(text, 2), 0)}
        for text in ("tp=2", "tp=2 tp_chunks=4")
    )
    for op, term in chunked.items():
        assert term.bytes == plain[op].bytes
        assert term.calls == plain[op].calls + 4 * 3
