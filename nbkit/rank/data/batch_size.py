"""Cuts a global batch: `global 64 = micro 8 x accum 2 x dp 4`. It never changes by itself."""

from __future__ import annotations

from dataclasses import dataclass

from nbkit.errors import TrainingError
from nbkit.strategy import Strategy


def steps_of_epoch(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Global batches in one pass over so many samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


@dataclass(frozen=True)
class Arithmetic:
    """total rows = micro rows per rank and forward x accum forwards x dp ranks.

    rows: of each of the dp ranks, where their speeds are unequal; then `micro` are at most in a forward.
    """

    total: int
    micro: int
    dp: int
    rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch_size: int, strategy: Strategy, *, microbatch_size: int | None) -> Arithmetic:
        """Raises TrainingError, with the numbers and the nearest that fit, when a division leaves a rest.

        A pipeline cuts what a rank gets into `strategy.microbatches`, whatever `microbatch_size` says.
        """
        dp = strategy.dp
        if batch_size < 1 or (microbatch_size is not None and microbatch_size < 1):
            raise TrainingError(
                "batch_size and microbatch_size are at least 1.",
                numbers=f"batch_size={batch_size}, microbatch_size={microbatch_size}",
                hint=f"batch_size={dp}",
            )
        if strategy.replica_speeds:
            by_speed = tuple(stop - start for start, stop in strategy.rows(batch_size))
            most = max(by_speed)
            return cls(batch_size, min(microbatch_size or most, most), dp, by_speed)
        if batch_size % dp:
            below, above = batch_size // dp * dp, (batch_size // dp + 1) * dp
            raise TrainingError(
                "The global batch is smaller than the number of ranks."
                if batch_size < dp
                else "The ranks do not divide the global batch.",
                numbers=f"batch_size {batch_size} / dp {dp} = {batch_size / dp:g} rows per rank",
                hint=f"batch_size={above}" + (f" or {below}" if below else ""),
            )
        rows = batch_size // dp
        name, asked = "microbatches", strategy.microbatches
        what = "The pipeline's micro-batches do not divide what a rank gets of the global batch."
        if asked is None:
            name, asked = "microbatch_size", microbatch_size or rows
            what = "The micro-batch does not divide what a rank gets of the global batch."
        if rows % asked:
            fitting = [n for n in range(1, rows + 1) if rows % n == 0]
            raise TrainingError(
                what,
                numbers=f"batch_size {batch_size} / dp {dp} = {rows} rows per rank, / {name} {asked} = "
                f"{rows / asked:g}",
                hint=f"{name}={min(fitting, key=lambda n: abs(n - asked))}   "
                f"(fitting: {', '.join(map(str, fitting[:12]))}{', ...' * (len(fitting) > 12)})",
            )
        return cls(total=batch_size, micro=asked if strategy.microbatches is None else rows // asked, dp=dp)

    @property
    def accum(self) -> int:
        """Forwards per rank and step."""
        return -(-max(self.rows or (self.total // self.dp,)) // self.micro)

    def __str__(self) -> str:
        if self.rows:
            return f"global {self.total} = {' + '.join(map(str, self.rows))} rows by speed, micro {self.micro} at most"
        return f"global {self.total} = micro {self.micro} x accum {self.accum} x dp {self.dp}"
