"""Option values of `nbkit.Trainer` and `nbkit.prepare`: settings that belong together, as small frozen values.

    trainer = nbkit.Trainer(..., checkpoints=nbkit.Checkpoints(every="10min", keep=3))

Each value checks itself when it is made, and its repr is what to type for it. This module imports no torch, so that the
notebook can make them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from nbkit.durations import seconds_of
from nbkit.errors import TrainingError
from nbkit.unfit_calls import says_what_it_takes

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _option(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that takes keywords alone, and names its fields when a keyword is wrong."""
    made: Any = dataclass(frozen=True, kw_only=True, repr=False)(kind)
    example = f"nbkit.{kind.__name__}({fields(made)[0].name}=...)"
    made.__init__ = says_what_it_takes(hint=example)(made.__init__)
    return made  # type: ignore[no-any-return]


class _Option:
    def __repr__(self) -> str:
        """Return the call that makes this value, with what differs from the defaults."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self))  # type: ignore[arg-type]
        words = [f"{name}={_shown(value)}" for name, value, default in given if value is not default]
        return f"nbkit.{type(self).__name__}({', '.join(words)})"

    def _check_count(self, name: str, *, least: int = 1, typical: int = 100, what: str = "") -> None:
        count = getattr(self, name)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < least):
            self._refuse(what or f"{name} is a whole number, at least {least}.", name, f"{name}={typical}")

    def _check_choice(self, name: str, choices: Sequence[str | None], *, typical: str) -> None:
        value = getattr(self, name)
        if value not in choices:
            numbers = ", ".join(map(repr, choices))
            self._refuse(f"There is no {name} {value!r}.", name, f"{name}={typical!r}", numbers=numbers)

    def _refuse(self, what: str, name: str, hint: str, *, numbers: str = "") -> None:
        raise TrainingError(
            what, numbers=numbers or f"{name}={getattr(self, name)!r}", hint=f"nbkit.{type(self).__name__}({hint})"
        )


def _shown(value: Any) -> str:
    simple = value is None or isinstance(value, bool | int | float | str | tuple | list | Mapping | _Option)
    if not simple:
        name = str(getattr(value, "__name__", ""))
        return repr(str(value)) if isinstance(value, Path) else name if name.isidentifier() else "..."
    text = repr(value)
    return text if len(text) <= 60 else "..."


@_option
class Loading(_Option):
    """The reading of samples, and how they become batches.

    shuffle: give each epoch another order. None (the default): do so for data that can be indexed. Data that can only
    be iterated comes in its own order. drop_last: leave out the last batch of an epoch when it is short (default:
    False). collate: samples -> batch; None (the default): torch's default_collate. workers: processes beside each rank
    that read ahead, also in shards (docs/reference/data.md); 0 (the default): samples are read in the step.

    Raises TrainingError if workers is not a number of processes.
    """

    shuffle: bool | None = None
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        self._check_count("workers", least=0, typical=2)


@_option
class Compute(_Option):
    """The computation of a step. The first four trade time for memory (docs/reference/memory.md).

    microbatch_size: rows per rank and forward pass; None (the default): all of them at once. recompute: compute
    activations again in the backward pass (default: False). loss_chunks: number of pieces in which head and cross
    entropy are computed, so that only the logits of one piece are in memory (default: 1). offload: "cpu" keeps the
    optimizer's state in host memory (default: None). compile: compile each block, where that is sound (default:
    False); a text is a mode of torch.compile. dropout: "keyed": the same under every strategy (the default on CPU
    ranks); "fused": attention kernels draw their own (the default on GPUs, whose fused kernels take no mask).
    grad_norm_every: steps between two gradient norms in the records of a Trainer that does not clip (default: 10).

    Raises TrainingError for a value that does not exist.
    """

    microbatch_size: int | None = None
    recompute: bool = False
    loss_chunks: int = 1
    offload: str | None = None
    compile: bool | str = False
    dropout: str | None = None
    grad_norm_every: int = 10

    def __post_init__(self) -> None:
        self._check_count("microbatch_size", typical=8)
        self._check_count("loss_chunks", typical=8)
        self._check_count("grad_norm_every")
        if self.offload not in (None, "cpu"):
            what = f"There is no place {self.offload!r} for the optimizer's state."
            self._refuse(what, "offload", "offload='cpu'", numbers="None, 'cpu'")
        self._check_choice("dropout", (None, "keyed", "fused"), typical="keyed")


@_option
class Checkpoints(_Option):
    """The checkpoints that a Trainer saves by itself: when, where, and which of them stay.

    every: write a checkpoint beside the training every so many steps, or every "10min" of training. None (the default):
    every 10 minutes in a detached cell, never elsewhere. False: never. path: the directory; None (the default):
    checkpoint in the run's directory. keep: how many checkpoints stay, or how old ones, as 3, "2h" or (3, "2h"); None
    (the default): one, which each save replaces. snapshot_every: steps between snapshots in host memory, to which
    `Trainer.rewind` goes back; None (the default): no snapshots.

    Raises TrainingError for a wrong number, and UsageError for a text that is not a length of time.
    """

    every: int | str | bool | None = None
    path: str | Path | None = None
    keep: int | str | tuple[int, str] | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.every, str) or self.every is False):
            self._check_count("every", what="every is a whole number of steps, at least 1, or a time such as '10min'.")
        self._check_count("snapshot_every", typical=50)
        paired = not isinstance(self.keep, tuple) or len(self.keep) == 2
        number, _ = (self.limits or (None, None)) if paired else (0, None)
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            self._refuse("keep is a whole number, at least 1, a length of time, or both.", "keep", "keep=3")
        _ = self.seconds

    @property
    def steps(self) -> int | None:
        """Return the steps between two checkpoints. None: steps do not count."""
        return None if isinstance(self.every, str) or not self.every else self.every

    @property
    def seconds(self) -> float | None:
        """Return the seconds of training between two checkpoints. None: time does not count."""
        return seconds_of(self.every) if isinstance(self.every, str) else None

    @property
    def limits(self) -> tuple[int | None, float | None] | None:
        """Return how many checkpoints stay, and for how many seconds. None: one, which each save replaces."""
        if self.keep is None:
            return None
        if isinstance(self.keep, tuple):
            number, age = self.keep
            return number, seconds_of(age)
        return (None, seconds_of(self.keep)) if isinstance(self.keep, str) else (self.keep, None)


@_option
class Recovery(_Option):
    """The reaction to ranks that die, hang, slow down or run out of memory.

    on_failure: "replace" a rank that dies and go on, if possible (the default; docs/reference/clusters.md); "shrink":
    go on with the ranks that are left; or "stop". hang_timeout: seconds after which a rank that all others wait for is
    ended, and counts as dead; in a script, the seconds after which a rank that waits ends the run. None (the default):
    never in a cluster, where the cell says after 30 s that nothing moves; 600 in a script; float("inf"): never.
    on_oom: a step that runs out of memory is taken back (docs/reference/memory.md). "fit" makes it again with a setting
    that fits; "ask" asks you for the setting (the default in a notebook); "raise" ends `fit` with the error (the
    default elsewhere). balance: measure how fast ranks compute, and switch to matching speeds= of the strategy when
    they change; under ep=, measure the tokens of experts, and exchange experts between ranks (default: False).
    backup_every: steps between backups of what one rank alone holds, in the host memory of another rank. None (the
    default): as often as costs below 5 % of a step, if a rank can be replaced. 0: no backups; a replacement then needs
    a checkpoint.

    In a loop over `job.batches` on_failure ("replace" or "stop") and backup_every apply; the rest is refused.
    Raises TrainingError for a value that does not exist.
    """

    on_failure: str = "replace"
    hang_timeout: float | None = None
    on_oom: str | None = None
    balance: bool = False
    backup_every: int | None = None

    def __post_init__(self) -> None:
        self._check_choice("on_failure", ("replace", "shrink", "stop"), typical="replace")
        limit = self.hang_timeout
        if limit is not None and not (isinstance(limit, int | float) and limit is not True and limit > 0):
            what = "hang_timeout is a number of seconds, more than 0."
            self._refuse(what, "hang_timeout", "hang_timeout=60")
        self._check_choice("on_oom", (None, "ask", "fit", "raise"), typical="fit")
        self._check_count("backup_every", least=0, typical=10)


@_option
class ModelHints(_Option):
    """Facts of a model, for where nbkit does not find them out.

    stages: names of the modules that begin stages 1, 2, ... of a pipeline. tp_plan: module name (with *) -> how tensor
    parallelism splits it. example: a small batch to run the model on, where the data cannot be indexed or a loop is the
    user's own. Pipelines and context parallelism need it, and so does tensor parallelism for all but well-known
    classes. None (the default of each): nbkit finds it out, as far as it can.
    """

    stages: Sequence[str] | None = None
    tp_plan: Mapping[str, str] | None = None
    example: Any = None


OPTIONS: dict[str, type[Any]] = {
    "loading": Loading,
    "compute": Compute,
    "checkpoints": Checkpoints,
    "recovery": Recovery,
    "hints": ModelHints,
}
"""The argument of each option value."""


def check_options(**given: Any) -> None:
    """Raise TrainingError for an argument that is not the option value of its name."""
    for name, value in given.items():
        kind = OPTIONS[name]
        if not isinstance(value, kind):
            field = fields(kind)[0].name
            raise TrainingError(
                f"{name}= takes nbkit.{kind.__name__}.",
                numbers=f"{name}={_shown(value)}",
                hint=f"{name}=nbkit.{kind.__name__}({field}=...)",
            )
