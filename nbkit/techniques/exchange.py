"""Describes how ranks that hold whole gradients exchange them. The planner computes the cost from this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Default bytes of the first bucket, which should be sent early, and of the other buckets."""
_FP32 = 4


@dataclass(frozen=True)
class GradientExchange:
    """Describes how ranks that hold whole gradients exchange them.

    bucket: bytes of gradients in one message; zero 1 and 2 also use such buckets. operations: the collectives for each
    bucket, one after the other. bytes_per_element: bytes of an element when it is sent; None for the gradients' own
    format. every: steps between two exchanges; if it is more than 1, weights are averaged and no gradients are sent.
    kept: bytes that a rank keeps from step to step, as a multiple of the bytes of its gradients.
    """

    bucket: int = BUCKET
    operations: tuple[str, ...] = ("all_reduce",)
    bytes_per_element: float | None = None
    every: int = 1
    kept: float = 0.0

    @property
    def is_sum(self) -> bool:
        """Return True if it is a single all-reduce, which can have two levels over several nodes."""
        return self.operations == ("all_reduce",)

    @property
    def share(self) -> float:
        """Return the bytes of one operation, as a share of the bytes of float32 gradients."""
        return 1.0 if self.bytes_per_element is None else self.bytes_per_element / _FP32

    def per_step(self, elements: float, gradients: float, weights: float) -> Iterator[tuple[str, int, str]]:
        """Yield (operation, bytes, name of the data) for each operation of a step.

        elements: the number that a rank trains. gradients, weights: their bytes in their own formats.
        """
        if self.every > 1:
            yield "all_reduce", round(weights / self.every), "weights, averaged now and then"
            return
        size = gradients if self.bytes_per_element is None else self.bytes_per_element * elements
        what = "gradients" if self.bytes_per_element is None else "gradients, rounded"
        for operation in self.operations:
            yield operation, round(size), what

    def buckets(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Yield the buckets for gradients of these sizes, in the order of backward: a list of sizes for each bucket.

        See `chunks` in nbkit/rank/parallel/data_parallel/buckets.py.
        """
        bucket: list[int] = []
        filled, limit = 0, min(FIRST_BUCKET, self.bucket)
        for size in sizes:
            if bucket and filled >= limit:
                yield bucket
                bucket, filled, limit = [], 0, self.bucket
            bucket.append(size)
            filled += size
        if bucket:
            yield bucket
