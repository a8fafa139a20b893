"""Test the memory peak of a step on small numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from nbkit.planner.peak import ModelPiece, Peak, PeakLine, Updating, Weights, most, peak, upper
from nbkit.planner.stages import place
from nbkit.planner.traffic import Rest
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy

PIECE = ModelPiece((PeakLine(0, 12),), PeakLine(0, 10), (PeakLine(100, 14),), PeakLine(0, 2))
PIECES, WEIGHTS = (PIECE,) * 4, (Weights((100,)),) * 4
REST = Rest(400, 400, 800)


def of(
    text: str, *, ranks: int = 1, number: int = 0, rows: float = 10, micros: int = 1, rest: Rest = REST, **more: bool
) -> Peak:
    strategy = Strategy.parse(text, ranks)
    ranges = place([1.0] * 4, strategy)[number] if strategy.pp > 1 else [(0, 4)]
    return peak(strategy, number, PIECES, WEIGHTS, ranges, rest, rows=rows, micros=micros, **more)


def test_upper_keeps_only_the_lines_that_are_highest_somewhere() -> None:
    lines = [PeakLine(5, 1), PeakLine(0, 2), PeakLine(2, 1), PeakLine(1, 1.5), PeakLine(4, 1.5)]
    assert all(most(upper(lines), rows) == max(line.at(rows) for line in lines) for rows in (0, 1, 2, 3, 5, 100))
    assert upper([PeakLine(5, 1), PeakLine(1, 1)]) == (PeakLine(5, 1),)


def test_the_peak_of_one_rank_is_at_the_start_of_backward() -> None:
    found = of("ddp", rows=20)
    # Four pieces keep 200 each. The backward of the last one uses 280 + 100 instead of its 200.
    assert (found.moment, found.activations, found.working, found.total) == ("backward", 800, 180, 400 + 800 + 980)


def test_the_peak_with_few_rows_is_in_the_update() -> None:
    assert (of("ddp", rows=0).moment, of("ddp", rows=0).total) == ("update", 1600 + 200)


def test_zero3_holds_its_shards_and_two_gathered_blocks_with_gradients() -> None:
    found = of("zero3", ranks=4, rest=Rest(100, 100, 200))
    # The 100 of the last piece are gathered, and those of the piece before it arrive.
    assert found.total == 400 + 400 + 140 + 200


def test_a_reduce_scatter_over_gloo_has_a_receive_buffer_under_zero3() -> None:
    def totals(text: str, ranks: int) -> tuple[int, ...]:
        return tuple(
            of(text, ranks=ranks, rest=Rest(400, 100, 200), rows=0, received=one).total for one in (False, True)
        )

    # All gradients are one bucket. The bucket is a copy, and the gradients are released before other parts arrive.
    assert totals("zero2", 4) == (700 + 2 * 400, 700 + 2 * 400)
    # Under zero3 they are released later. Between two ranks, half of the bytes arrive.
    (plain, gloo), (two, two_gloo) = totals("zero3", 4), totals("zero3", 2)
    assert gloo - plain == 2 * (two_gloo - two) > 0


@pytest.mark.parametrize(("schedule", "first", "last"), [("gpipe", 8, 8), ("1f1b", 4, 1)])
def test_a_pipeline_stage_keeps_the_micro_batches_in_flight(schedule: str, first: int, last: int) -> None:
    """Expect 10,000 for each: less the 2,000 that the first stage sends, plus the 2,000 that the last one receives."""
    for number, each, under_way in ((0, 8000, first), (3, 12000, last)):
        rest, text = Rest(100, 100, 200), f"pp schedule={schedule} microbatches=8"
        assert of(text, ranks=4, number=number, rows=1000, micros=8, rest=rest).activations == each * under_way


def test_a_split_backward_keeps_output_gradients_until_the_weight_gradients() -> None:
    strategy, rest = Strategy.parse("pp schedule=zbv microbatches=8", 4), Rest(100, 100, 200)
    ranges = place([1.0] * 8, strategy)[0]
    schedule, held, most_held = Schedule.of("zbv", 4, 8), [0, 0], [0, 0]
    for op in schedule.ops[0]:
        held[0] += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
        held[1] += {"I": 1, "W": -1}.get(op.kind, 0)
        most_held = max(most_held, [held[0] + held[1], held[1]])
    assert most_held[1] > 0
    # What forward keeps and what waits between the halves have the same size. Nothing is sent to the next stage.
    plain, split = (ModelPiece((), PeakLine(0, 10), (), PeakLine(), PeakLine(0, size)) for size in (0, 10))
    tops = [
        peak(strategy, 0, (piece,) * 8, (Weights((100,)),) * 8, ranges, rest, rows=1000, micros=8).activations
        for piece in (plain, split)
    ]
    assert tops[1] == 10_000 * most_held[0] > tops[0]


def test_an_optimizer_that_updates_all_at_once_raises_the_peak() -> None:
    strategy, ranges = Strategy.parse("ddp", 1), [(0, 4)]
    one = peak(strategy, 0, PIECES, WEIGHTS, ranges, REST, rows=0, updating=Updating(0, 3.0))
    assert (one.moment, one.total) == ("update", 1600 + 3 * 400)
