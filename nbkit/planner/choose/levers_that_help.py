"""Which levers of the data axis (nbkit/levers.py) make a step shorter that waits for its link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nbkit.levers import Levers
from nbkit.strategy import Strategy

_WORTH = 0.95
"""Of a step's seconds, what a lever has to leave at most to be worth a word."""
_EXACT = tuple(Levers(bucket=size << 20) for size in (1, 4, 100))
_ROUGH = Levers(compress="bf16"), Levers(compress="int8"), Levers(sync_every=8)


def levers_that_help(strategy: Strategy, plain: float, predict: Callable[[Strategy], float | None]) -> dict[str, float]:
    """lever -> seconds of a step with it, predicted: of sizes of buckets the best, which changes no sum, then those
    after which a training is not that of one process.

    plain: of `strategy` without any; nothing where it holds no whole gradients on all ranks.
    """
    if strategy.zero or strategy.dp == 1 or strategy.dp < strategy.mesh.size:
        return {}
    found = {}
    for lever in (*_EXACT, *_ROUGH):
        took = predict(replace(strategy, levers=lever))
        if took is not None and took <= _WORTH * plain:
            found[lever] = took
    exact = sorted((found.pop(lever), str(lever)) for lever in _EXACT if lever in found)[:1]
    return {**{lever: took for took, lever in exact}, **{str(lever): took for lever, took in found.items()}}


def is_exact(lever: str) -> bool:
    """Whether a training with it has the losses of one process."""
    return Levers.parse(dict(word.split("=", 1) for word in lever.lower().split())).deviation is None
