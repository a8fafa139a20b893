"""Switches of a job whose memory is 90 % full: in place, what a rank holds at the peak beside the larger model.

The limit is emulated (NBKIT_MEMORY_LIMIT); the peak is the kernel's count of resident bytes, from which everything is
taken that is no tensor of a model. One more switch is refused memory on one rank half-way, and rolls back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from bench.rigs.forked import Ranks
from bench.rigs.formulas import Model
from bench.settings import Settings
from bench.table import Row

RANKS = 4
SIZE = {"width": 640, "layers": 9, "vocab": 1536, "block": 16, "batch": 8}  # 46 million parameters
TOUR = ("ddp", "zero3", "tp", "pp", "zero1", "zero3", "ddp")
"""From each to the next."""
FULL, HALF = 0.9, 0.5
BAR_BYTES = 64 << 20
BAR_LOSS = 1e-5


def run(settings: Settings) -> list[Row]:
    """Two rows: switches that succeed, switches that are rolled back."""
    ranks = settings.sizes((RANKS,))
    if not ranks:
        return []
    with Ranks("switch.switch_full_ranks", ranks[0], folder=settings.folder, start=TOUR[0], **SIZE) as asked:
        losses: list[float] = []
        done: dict[str, list[dict[str, Any]]] = {}
        back: dict[str, list[dict[str, Any]]] = {}
        for old, new in pairwise(TOUR[:3] if settings.quick else TOUR):
            back[f"{old} → {new}"] = asked.ask("switch", strategy=new, full=FULL, fails_after=HALF)
            done[f"{old} → {new}"] = asked.ask("switch", strategy=new, full=FULL)
            losses += [back[f"{old} → {new}"][0]["loss"], done[f"{old} → {new}"][0]["loss"]]
    with Ranks("switch.switch_full_ranks", ranks[0], folder=settings.folder, start=TOUR[0], **SIZE) as asked:
        never = [asked.ask("step")[0] for _ in losses]
    apart = max(abs(one - other) for one, other in zip(losses, never, strict=True))
    size = f"{12 * Model(**SIZE).parameters / 2**20:.0f} MiB of weights and moments, {ranks[0]} ranks, memory 90 % full"
    held = all(one["place"] and one["identical"] for said in done.values() for one in said)
    refused = all(one["failed"] for said in back.values() for one in said)
    return [
        _row(f"switch in place, {size}", done, held, apart),
        _row(f"the same, refused memory half-way and rolled back, {size}", back, refused, apart),
    ]


def _row(what: str, said: dict[str, list[dict[str, Any]]], sound: bool, apart: float) -> Row:
    beyond = {name: max(one["most"] - one["held"] for one in every) for name, every in said.items()}
    most = max(beyond.values())
    return Row(
        what,
        f"at the peak {most / 2**20:.0f} MB beyond the larger model ("
        + ", ".join(f"{name} {extra / 2**20:.0f}" for name, extra in beyond.items())
        + f"); losses {apart:.1g} from never switched",
        "",
        "",
        "",
        f"≤ {BAR_BYTES >> 20} MB; losses ≤ {BAR_LOSS:g}",
        sound and most <= BAR_BYTES and apart <= BAR_LOSS,
        {
            "bytes beyond": list(beyond.values()),
            "pause": [max(one["pause"] for one in every) for every in said.values() if every[0]["pause"] is not None],
        },
    )
