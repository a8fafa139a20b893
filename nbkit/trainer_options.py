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

RECOMPUTE: tuple[bool | str, ...] = (False, "selective", True)
"""The values of `Compute.recompute`, from the shortest step to the least memory."""


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

    def _check_choice(self, name: str, choices: Sequence[bool | str | None], *, typical: bool | str) -> None:
        value = getattr(self, name)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
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
    """Settings for reading samples and for making batches of them.

    shuffle: shuffle the data in each epoch. None (the default): shuffle if the data can be indexed. Iterable data keeps
    its own order. drop_last: leave out the last batch of an epoch if it is short (default: False). collate: a function
    that makes a batch from a list of samples; None (the default): torch's default_collate. workers: processes for each
    rank that read the next batches (docs/reference/data.md); 0 (the default): the rank reads samples during the step.

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
    """Settings for the computation of a step. The first four save memory, but take time (docs/reference/memory.md).

    microbatch_size: rows of a rank in one forward pass; None (the default): all rows of the rank. recompute: compute
    activations again in the backward pass (default: False). True: all of a block. "selective": all but matrix products,
    attention and collectives, whose results are kept. loss_chunks: number of pieces in which the head and the
    cross entropy are computed (default: 1). Only the logits of one piece are in memory. offload: "cpu" keeps the
    optimizer's state in host memory (default: None). fp8: compute linear layers in 8 bits, which is faster on new GPUs,
    with torchao (default: False; docs/reference/trainer.md). compile: compile each block, if the strategy and the model
    allow it (default: False). A text is a mode of torch.compile. dropout: "keyed" makes dropout the same under every
    strategy (the default on CPU ranks). "fused" lets attention kernels draw their own masks (the default on GPUs,
    because fused kernels take no mask). grad_norm_every: steps between two gradient norms in the records, for a Trainer
    without clip_norm (default: 10).

    Raises TrainingError for an invalid value.
    """

    microbatch_size: int | None = None
    recompute: bool | str = False
    loss_chunks: int = 1
    offload: str | None = None
    fp8: bool = False
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
        self._check_choice("recompute", RECOMPUTE, typical="selective")
        self._check_choice("fp8", (False, True), typical=True)
        self._check_choice("dropout", (None, "keyed", "fused"), typical="keyed")


@_option
class Checkpoints(_Option):
    """Settings for the checkpoints that a Trainer saves automatically.

    every: save during the training after this many steps, or after this much training time, such as "10min". None (the
    default): every 10 minutes in a detached cell, otherwise never. False: never. path: the directory; None (the
    default): `checkpoint` in the run's directory. keep: the maximum number of checkpoints (3), their maximum age
    ("2h"), or both ((3, "2h")). None (the default): one checkpoint, which each save replaces. snapshot_every: steps
    between two snapshots in host memory, for `Trainer.rewind`; None (the default): no snapshots.

    Raises TrainingError for an invalid number, and UsageError for a text that is not a length of time.
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
    """Settings for ranks that die, hang, slow down or run out of memory.

    on_failure: what to do when a rank dies. "replace" (the default): start a new rank in its place, if possible, and
    continue (docs/reference/dead-ranks.md). "shrink": continue with the remaining ranks. "stop": end the training.
    hang_timeout: in a cluster, nbkit kills a rank when all others have waited for it this long. The rank then counts as
    dead. In a script, a rank that has waited this long ends the run. None (the default): 600 s in a script. In a
    cluster there is no limit, and the cell reports a hang after 30 s. float("inf"): no limit. on_oom: what to do when a
    step has run out of memory and was undone (docs/reference/out-of-memory.md). "fit": repeat the step with a setting
    that fits. "ask": ask you for the setting (the default in a notebook). "raise": end `fit` with the error (the
    default elsewhere). balance: measure how fast ranks compute. When their speeds change, switch to a strategy with
    matching speeds=. Under ep=, measure the tokens of experts, and exchange experts between ranks (default: False).
    backup_every: steps between two backups. A backup copies state that only one rank holds to the host memory of
    another rank. None (the default): if a rank can be replaced, nbkit makes backups as often as possible, but spends at
    most 5 % of the time on them. 0: no backups; a replacement then needs a checkpoint.

    In a loop of your own over `job.batches` (docs/reference/prepare.md), only on_failure ("replace" or "stop") and
    backup_every are allowed. Raises TrainingError for an invalid value.
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
    """Facts about a model that nbkit cannot always find itself.

    stages: names of the modules that begin stages 1, 2, ... of a pipeline. tp_plan: how tensor parallelism splits
    modules, such as `{"blocks.*.up": "colwise"}` (docs/reference/models.md). A * stands for any characters. example: a
    small batch to run the model on. A Trainer takes it from data that can be indexed. In other cases, give a batch.
    Without one, nbkit refuses pp and cp, and tp splits only well-known classes (docs/reference/models.md).

    For a hint that is None (the default), nbkit tries to find the fact itself.
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
