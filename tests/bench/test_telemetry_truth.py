"""Test that the records of real trainings show a planted delay on the right rank and with the right cause.

The delay is several times that of the benchmark, so that it stands out on a busy machine.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from bench.rigs.forked import Ranks
from bench.telemetry.telemetry_truth import COMPUTE, SIZE, Delay, Recorded, delays, expected
from nbkit.strategy import Strategy

DELAY, STEPS = 0.3, 4


def late_in(folder: Path, strategy: str, wanted: list[Delay]) -> tuple[Recorded, list[range]]:
    """Train with each of these delays in turn. Return the records, and the steps that had each delay."""
    with Ranks("telemetry.telemetry_truth", 4, folder=folder, **SIZE) as ranks:
        run = ranks.ask("prepare", strategy=strategy, compute=COMPUTE)[0]
        ranks.ask("train", steps=2)
        spans = []
        for delay in wanted:
            first, last = ranks.ask("train", steps=STEPS, where=delay.where, seconds=DELAY, ranks=delay.ranks)[0]
            # The first step of a run is left out: it also has the start-up of the run.
            spans.append(range(first + 1, last + 1))
        return Recorded(folder / run), spans


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_delay_on_one_rank_or_link_is_found_within_three_steps(tmp_path: Path) -> None:
    """Check delays on two axes, one with links. Six other strategies: python -m bench telemetry_truth."""
    chosen = Strategy.parse("dp=2 pp=2", 4)
    wanted = delays(chosen)
    assert [delay.part for delay in wanted].count("exposed") >= 1

    recorded, spans = late_in(tmp_path, str(chosen), wanted)

    of_a_step = [part for steps in spans for step in steps for part in recorded.steps[step].values()]
    assert min(one.parts["compute"] for one in of_a_step) >= COMPUTE  # it sleeps that long, on every rank
    for delay, steps in zip(wanted, spans, strict=True):
        assert len(steps) == 3
        rank, source = delay.ranks[-1], delay.ranks[0]
        seen = [recorded.seconds(step, rank, source)[delay.part] for step in steps]
        assert median(seen) >= 0.9 * DELAY, delay  # the exact values: python -m bench telemetry_truth
        assert expected(delay, chosen)(recorded.told(steps, delay)), (delay, recorded.told(steps, delay))
