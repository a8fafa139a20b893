"""Every error that nbkit raises on purpose. Each says what is wrong, the numbers, and what to type next.

    NbkitError
    ├── UsageError            an argument has no valid meaning               (also a ValueError)
    ├── ClusterError          a cluster cannot start, be found or be reached
    │   ├── ClusterNotFound
    │   ├── ClusterExists
    │   └── CellRunning       a cell was sent while another cell runs
    ├── CellError             a cell failed on some rank: .rank, .ranks, .traceback
    │   └── RankDied          the process of a rank ended
    ├── TransferError         push or pull refused
    ├── StrategyError         a strategy does not fit                        (also a ValueError)
    ├── TrainingError         a job cannot train as requested                (also a ValueError)
    │   ├── NotFinite         the loss became NaN or infinite: .step, .rank
    │   ├── SwitchError       a change of strategy failed; the old one stays in force
    │   └── TornCheckpoint    a checkpoint is incomplete, damaged or unreadable
    └── BoardError            TensorBoard could not be started

    Stopped                   a KeyboardInterrupt: the user asked a training to stop, at a step boundary
    CellStopped               a KeyboardInterrupt: the user stopped a cell

A notebook shows the lines of the error instead of a Python traceback: IPython calls `_render_traceback_`. The
error is still raised, so Run All stops.
"""

from __future__ import annotations

__all__ = [
    "BoardError",
    "CellError",
    "CellRunning",
    "CellStopped",
    "ClusterError",
    "ClusterExists",
    "ClusterNotFound",
    "NbkitError",
    "NotFinite",
    "RankDied",
    "Stopped",
    "StrategyError",
    "SwitchError",
    "TornCheckpoint",
    "TrainingError",
    "TransferError",
    "UsageError",
]

_RED, _DIM, _PLAIN = "\x1b[31m", "\x1b[2m", "\x1b[0m"


class NbkitError(Exception):
    """The base class of all errors.

    what: one sentence. numbers: the figures that explain it. hint: what to type next.
    """

    def __init__(self, what: str, *, numbers: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.numbers, self.hint = what, numbers, hint

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.numbers, self.hint and f"→ {self.hint}") if line)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows for this error."""
        lines = [f"{_RED}{type(self).__name__}{_PLAIN}: {self.what}"]
        if self.numbers:
            lines.append(f"  {self.numbers}")
        if self.hint:
            lines.append(f"  {_DIM}→{_PLAIN} {self.hint}")
        return lines


def _rebuild(kind: type[NbkitError], args: tuple[str, ...], state: dict[str, object]) -> NbkitError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(NbkitError, ValueError):
    """An argument has no valid meaning."""


class ClusterError(NbkitError):
    """A cluster cannot start, be found or be reached."""


class ClusterNotFound(ClusterError):
    """There is no cluster of that name."""


class ClusterExists(ClusterError):
    """A running cluster has this name already."""


class CellRunning(ClusterError):
    """A cell was sent while another cell runs."""


class CellError(NbkitError):
    """A cell failed. `rank` failed first, `ranks` are all that failed, `traceback` is the text of the first one."""

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        ranks: tuple[int, ...] = (),
        traceback: str = "",
        numbers: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(what, numbers=numbers, hint=hint)
        self.rank, self.ranks, self.traceback = rank, ranks or (rank,), traceback


class RankDied(CellError):
    """The process of a rank ended."""


class TransferError(NbkitError):
    """A push or pull was refused."""


class StrategyError(NbkitError, ValueError):
    """A strategy does not fit the number of ranks, the model or the batch."""


class TrainingError(NbkitError, ValueError):
    """A job cannot train as requested."""


class NotFinite(TrainingError):
    """The loss became NaN or infinite. If `spoiled`, the weights are not finite either, so load a checkpoint."""

    def __init__(
        self, what: str, *, step: int, rank: int, spoiled: bool = False, numbers: str = "", hint: str = ""
    ) -> None:
        super().__init__(what, numbers=numbers, hint=hint)
        self.step, self.rank, self.spoiled = step, rank, spoiled


class SwitchError(TrainingError):
    """The strategy could not be changed. The old one is still in force, and nothing has changed."""


class TornCheckpoint(TrainingError):
    """A checkpoint is incomplete, damaged or unreadable. Nothing has changed."""


class BoardError(NbkitError):
    """TensorBoard could not be started."""


class Stopped(KeyboardInterrupt):
    """The user stopped a training. All ranks raise it at the same step boundary, and the state is intact."""


class CellStopped(KeyboardInterrupt):
    """The user stopped a cell. The message says what happened to each rank."""

    def _render_traceback_(self) -> list[str]:
        return [f"{_RED}KeyboardInterrupt{_PLAIN}: {self}"]
