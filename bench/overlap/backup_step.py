"""What a backup of each step costs: blocks that sleep, and a link that carries a rank's share in half of their time."""

from __future__ import annotations

import statistics

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import ratio
from bench.table import Row

RANKS, ROUNDS, STEPS = 4, 8, 6
COMPUTE_S = 0.3
SHARES = (1 / 2, 1 / 3)  # of it that the link takes; the forward pass, beside which it is sent, takes a third
BAR, BYTES_BAR = 1.05, 1.001


def run(settings: Settings) -> list[Row]:
    """For each strategy: a step beside one without backups, in turns, at two speeds of the link; and the bytes sent."""
    rows = []
    for strategy in ("zero3", "pp"):
        name = "overlap.backup_step_ranks"
        with Ranks(name, RANKS, folder=settings.folder, strategy=strategy, compute=COMPUTE_S) as ranks:
            rows += _rows(ranks, strategy, settings.count(ROUNDS))
    return rows


def _rows(ranks: Ranks, strategy: str, rounds: int) -> list[Row]:
    what = f"backup of each step, {strategy} on {RANKS} ranks"
    sent, rows = 0.0, []
    for share in SHARES:
        backed_up, alone = [], []
        for number in range(rounds):
            for every in (1, 0) if number % 2 else (0, 1):
                said = ranks.ask("steps", every=every, steps=STEPS, share=share)
                seconds = statistics.median(max(each) for each in zip(*(one["seconds"] for one in said), strict=True))
                (backed_up if every else alone).append(seconds)
                if every:
                    sent = sum(one["bytes"] for one in said) / said[0]["whole"]
        figure = ratio(backed_up, alone)
        row = Row(
            f"{what}, carried in 1/{1 / share:.0f} of a step's compute of {COMPUTE_S * 1e3:.0f} ms: step",
            f"{1e3 * statistics.median(backed_up):.0f} ms",
            f"without {1e3 * statistics.median(alone):.0f} ms",
            f"{figure.middle:.3f} [{figure.low:.3f}, {figure.high:.3f}]",
            "",
            f"≤ {BAR:g} x (median)",
            figure.middle <= BAR,
            {"nbkit": backed_up, "alone": alone},
        )
        rows.append(row)
    return [
        *rows,
        Row(
            f"{what}: bytes that all ranks send / weights and optimizer state of the model",
            f"{sent:.4f}",
            "",
            "",
            "",
            f"≤ {BYTES_BAR:g}",
            sent <= BYTES_BAR,
        ),
    ]
