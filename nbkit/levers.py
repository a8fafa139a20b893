"""Options of the data axis: the size of its messages, the format of the gradients in them, how often it sends.

bucket=25M        bytes of gradients in one message; the sums are the same
compress=int8     gradients travel as int8 (or bf16): fewer bytes, sums that are off within a bound
sync_every=8      each replica makes 8 steps by itself, then weights are averaged: an eighth of the bytes

zero=3 has no buckets. compress= and sync_every= need ranks that hold the whole model and its whole gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbkit.errors import StrategyError

KEYS = ("bucket", "compress", "sync_every")
FORMATS = ("bf16", "int8")
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Default bytes of the first bucket, which should leave early, and of the other buckets."""
BLOCK = 512
"""Elements that share one float32 scale under compress=int8."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Levers:
    """Values of the options.

    bucket: bytes. compress: one of FORMATS, or "" for the gradients' own format. sync_every: steps between averages.
    """

    bucket: int = BUCKET
    compress: str = ""
    sync_every: int = 1

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> Levers:
        """Return the levers in the keys of a strategy, values as written. Raises StrategyError for an invalid value."""
        compress = settings.get("compress", "")
        if "compress" in settings and compress not in FORMATS:
            raise StrategyError(
                f"{'compress=' + compress!r} is not a format.",
                numbers=f"formats: {' '.join(FORMATS)}",
                hint="compress=int8",
            )
        every = settings.get("sync_every", "1")
        if not (every.isascii() and every.isdecimal()) or int(every) < 1:
            raise StrategyError(
                f"{'sync_every=' + every!r} is not a number of steps.",
                numbers="steps that each replica makes by itself: a whole number >= 1",
                hint="sync_every=8",
            )
        return cls(_bytes(settings["bucket"]) if "bucket" in settings else BUCKET, compress, int(every))

    def without_effect(self, given: Mapping[str, str]) -> Iterator[str]:
        """Yield a sentence for each key of `given` that changes nothing."""
        if "bucket" in given and self.bucket == BUCKET:
            yield f"bucket={_spelled(BUCKET)} has no effect: buckets are as large without it"
        if "sync_every" in given and self.sync_every == 1:
            yield "sync_every=1 has no effect: ranks sum their gradients in every step"

    def check(self, *, dp: int, zero: int, size: int) -> None:
        """Raise StrategyError if the levers do not suit a mesh of `size` ranks, `dp` of them along dp."""
        if self == NONE:
            return
        if dp == 1:
            raise StrategyError(
                f"{self} is about what data parallel ranks send each other, and there is one.",
                numbers=f"dp 1 of {size} rank{'s' * (size != 1)}",
                hint=f"dp={max(size, 2)} {self}",
            )
        if self.bucket != BUCKET and zero == 3:
            raise StrategyError(
                "zero3 has no buckets: it gathers and sums the parameters of a block together.",
                numbers=f"bucket={_spelled(self.bucket)} zero=3",
                hint=f"zero2 bucket={_spelled(self.bucket)}",
            )
        seldom = Levers(BUCKET, self.compress, self.sync_every)
        if seldom == NONE:
            return
        if zero or dp < size:
            split = f"zero={zero}" if zero else f"dp {dp} of {size} ranks"
            raise StrategyError(
                f"{seldom} is for ranks that hold the whole model and its whole gradients.",
                numbers=f"{split}: here a rank holds a part, and what it holds is whole by the others' in every step",
                hint=f"dp={size} {seldom}",
            )
        if self.sync_every > 1 and (self.compress or self.bucket != BUCKET):
            raise StrategyError(
                "With sync_every= no gradients are sent.",
                numbers=str(self),
                hint=f"sync_every={self.sync_every}, or {Levers(self.bucket, self.compress)}",
            )

    @property
    def deviation(self) -> tuple[str, str] | None:
        """Return how a training differs from that of one process, and by how much; None if it does not."""
        if self.compress == "int8":
            return (
                "compress=int8: the gradients that ranks sum are rounded, so that losses are not those of one process.",
                f"an element of a rank, and of their sum, is off by at most 1/254 of the largest of its {BLOCK}; what "
                "is off is added in the next step, and dropped by a switch, a load or a step that breaks",
            )
        if self.compress == "bf16":
            return (
                "compress=bf16: the gradients that ranks sum are rounded, so that losses are not those of one process.",
                "an element of a rank, and of their sum, is off by at most 1/256 of itself",
            )
        if self.sync_every > 1:
            return (
                f"sync_every={self.sync_every}: replicas train apart, and losses are not those of one process.",
                f"weights are averaged every {self.sync_every} steps, before an evaluation and at the end of fit; the "
                "optimizer's state stays each rank's own until a switch or a checkpoint averages it",
            )
        return None

    @property
    def share(self) -> float:
        """Return the bytes that are sent, as a share of the bytes of the gradients."""
        bytes_per_element = {"": 4.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK}[self.compress]
        return bytes_per_element / 4 / self.sync_every

    def __str__(self) -> str:
        words = [f"bucket={_spelled(self.bucket)}"] * (self.bucket != BUCKET)
        words += [f"compress={self.compress}"] * bool(self.compress)
        return " ".join(words + [f"sync_every={self.sync_every}"] * (self.sync_every > 1))


NONE = Levers()


def buckets(sizes: Sequence[int], size_of_one: int = BUCKET) -> Iterator[list[int]]:
    """Yield the buckets that the data axis makes of gradients: lists of bytes, in the order of backward.

    See gradient_buckets.chunks.
    """
    bucket: list[int] = []
    filled, limit = 0, min(FIRST_BUCKET, size_of_one)
    for size in sizes:
        if bucket and filled >= limit:
            yield bucket
            bucket, filled, limit = [], 0, size_of_one
        bucket.append(size)
        filled += size
    if bucket:
        yield bucket


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([kmg]?)b?", text, re.ASCII)
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if size < 1:
        raise StrategyError(
            f"{'bucket=' + text!r} is not a size.",
            numbers="bytes, or with K, M or G behind the number",
            hint="bucket=25M",
        )
    return size


def _spelled(size: int) -> str:
    for unit in "gmk":
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit.upper()}"
    return str(size)
