"""Bytes that ranks hold at the end of a step, gradients still there, beside the formulas of the literature.

Counted from the storages of the tensors. What else of torch is alive in the process is told apart.
"""

from __future__ import annotations

from bench.rigs.forked import Ranks
from bench.rigs.formulas import Model, bytes_at_rest
from bench.settings import Settings
from bench.table import Row
from nbkit.strategy import Strategy

RANKS = (2, 4, 8)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp", "pp")
PER_PARAMETER = {"ddp": "16", "zero1": "8+8/N", "zero2": "4+12/N", "zero3": "16/N", "tp": "16/N", "pp": "16/N"}
WIDTH, LAYERS, BLOCK, BATCH = 256, 8, 16, 16
BAR = 0.005
REST_BYTES = 1 << 20
"""Of the batch and of numbers about the step; more would be a copy of something."""


def run(settings: Settings) -> list[Row]:
    """A row for each strategy, with all numbers of ranks."""
    width = 64 if settings.quick else WIDTH
    model = Model(vocab=256, block=BLOCK, layers=LAYERS, width=width, batch=BATCH)
    ratios: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    rest: dict[str, list[int]] = {name: [] for name in STRATEGIES}
    most: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    sizes = settings.sizes(RANKS)
    for num in sizes:
        with Ranks("steps.memory_ranks", num, folder=settings.folder) as ranks:
            for name in STRATEGIES:
                said = ranks.ask("held", width=width, layers=LAYERS, block=BLOCK, batch=BATCH, strategy=name)
                expected = bytes_at_rest(model, Strategy.parse(name, num))
                ratios[name][num] = sum(one["held"] for one in said) / expected
                most[name][num] = max(one["held"] for one in said) / model.parameters
                rest[name].append(max(one["rest"] for one in said))
    return [_row(name, ratios[name], most[name], rest[name]) for name in STRATEGIES if sizes]


def _row(name: str, ratios: dict[int, float], most: dict[int, float], rest: list[int]) -> Row:
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    every = ", ".join(f"{n} ranks {size:.3f}" for n, size in most.items())
    return Row(
        f"tensor bytes at the end of a step, {name}",
        f"per parameter, the fullest of {every}",
        f"{PER_PARAMETER[name]} bytes; beside it at most {max(rest) / 1e6:.2f} MB of other tensors",
        f"{worst:.5f}",
        "",
        f"1 ± {BAR:g}; ≤ {REST_BYTES >> 20} MB beside it",
        abs(worst - 1) <= BAR and max(rest) <= REST_BYTES,
        {"held / formula": list(ratios.values())},
    )
