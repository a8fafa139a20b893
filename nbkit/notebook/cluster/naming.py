"""Small questions with one answer: which ranks are meant, what a nameless cluster is called."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.cluster import registry

_FIRST = ("amber", "brisk", "calm", "clear", "eager", "gentle", "lucid", "mellow", "quick", "quiet", "steady", "vivid")
_SECOND = ("brook", "cedar", "comet", "delta", "ember", "finch", "harbor", "lark", "maple", "otter", "ridge", "willow")


def chosen_ranks(ranks: Sequence[int] | str | None, n: int) -> tuple[int, ...]:
    """`"0,2-3"`, `[0, 2, 3]` or None (all of `n`) as sorted ranks. Raises UsageError for what is not a rank."""
    if ranks is None:
        return tuple(range(n))
    if isinstance(ranks, str):
        ranks = _parsed(ranks, n)
    chosen = tuple(sorted(set(ranks)))
    wrong = [rank for rank in chosen if not 0 <= rank < n]
    if wrong or not chosen:
        raise UsageError(
            f"There is no rank {wrong[0]}." if wrong else "No rank is chosen.",
            numbers=f"the cluster has {n} ranks: 0-{n - 1}",
            hint=f"--ranks 0-{n - 1}" if n > 1 else "--ranks 0",
        )
    return chosen


def _parsed(text: str, n: int) -> list[int]:
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise UsageError(
                f"{text!r} does not name ranks.", numbers=f"the cluster has ranks 0-{n - 1}", hint="--ranks 0,2-3"
            )
        ranks += range(int(low), int(high or low) + 1)
    return ranks


def made_up_name() -> str:
    """A name that no cluster of this user has."""
    while True:
        name = f"{random.choice(_FIRST)}-{random.choice(_SECOND)}"
        if not (registry.home() / name).exists():
            return name


def notebook_number() -> int:
    """The number of the notebook cell that runs now; 0 outside of a notebook."""
    shell = notebook_shell()
    if shell is None:
        return 0
    # The shell's own counter is ahead by one while a cell runs, in some versions of IPython.
    running = getattr(shell.displayhook, "exec_result", None)
    return int(getattr(running, "execution_count", None) or shell.execution_count)


def names_of_notebook() -> frozenset[str]:
    """Names that are defined in the notebook's own namespace."""
    shell = notebook_shell()
    return frozenset(shell.user_ns) if shell is not None else frozenset()


def notebook_shell() -> Any:
    """IPython's shell; None outside of IPython, which is not imported for the question."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None
