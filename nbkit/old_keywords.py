"""Keywords of `nbkit.Trainer`, `nbkit.prepare` and `nbkit.check` that are now fields of option values.

This release still accepts them, with a DeprecationWarning that says what to type. To drop them, delete this file and
the calls of `regrouped`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nbkit.errors import UsageError
from nbkit.trainer_options import OPTIONS, check_options

OLD_KEYWORDS = {
    "shuffle": ("loading", "shuffle"),
    "drop_last": ("loading", "drop_last"),
    "collate": ("loading", "collate"),
    "workers": ("loading", "workers"),
    "microbatch_size": ("compute", "microbatch_size"),
    "recompute": ("compute", "recompute"),
    "offload": ("compute", "offload"),
    "compile": ("compute", "compile"),
    "dropout": ("compute", "dropout"),
    "log_every": ("compute", "grad_norm_every"),
    "save_every": ("checkpoints", "every"),
    "save_path": ("checkpoints", "path"),
    "keep": ("checkpoints", "keep"),
    "snapshot_every": ("checkpoints", "snapshot_every"),
    "on_failure": ("recovery", "on_failure"),
    "hang_timeout": ("recovery", "hang_timeout"),
    "on_oom": ("recovery", "on_oom"),
    "balance": ("recovery", "balance"),
    "backup_every": ("recovery", "backup_every"),
    "stages": ("hints", "stages"),
    "tp_plan": ("hints", "tp_plan"),
    "example": ("hints", "example"),
}
"""Old keyword -> (argument, field of its option value)."""


def regrouped(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a call with old keywords moved into option values. Warns of each old keyword.

    names: the parameters of the function. The warning names the line that called the caller of this function.
    Raises UsageError if an old keyword and the argument that replaces it are both given, and TrainingError for a wrong
    value.
    """
    old = {name: OLD_KEYWORDS[name] for name in given if name in OLD_KEYWORDS and OLD_KEYWORDS[name][0] in names}
    if not old:
        return given
    kept = {name: value for name, value in given.items() if name not in old}
    moved: dict[str, Any] = {}
    for argument in dict.fromkeys(argument for argument, _ in old.values()):
        values = {field: given[name] for name, (at, field) in old.items() if at == argument}
        if argument in kept:
            check_options(**{argument: kept[argument]})
            both = ", ".join(f"{name}=" for name, (at, _) in old.items() if at == argument)
            raise UsageError(
                f"{both} and {argument}= are given together.",
                numbers=f"{both} is now in {argument}=",
                hint=f"{argument}={replace(kept[argument], **values)!r}",
            )
        moved[argument] = OPTIONS[argument](**values)
    typed = ", ".join(f"{argument}={value!r}" for argument, value in moved.items())
    said = ", ".join(f"{name}=" for name in old)
    are = "is" if len(old) == 1 else "are"
    warnings.warn(f"{said} {are} deprecated: type {typed}", DeprecationWarning, stacklevel=3)
    return kept | moved
