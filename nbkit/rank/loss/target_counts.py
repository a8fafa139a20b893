"""How many targets of a batch count, read from its labels before the model runs.

A loss of several cross entropies that count unequal numbers of targets has no one weight. Where each takes its targets
from a tensor of the batch, they are counted there first: each is then divided by the number of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nbkit.rank.loss.output_tensors import leaves


@dataclass(frozen=True)
class Labels:
    """A tensor of the batch that gives the targets. first: their first position; ignored: the class that is none."""

    name: str
    first: int
    ignored: int

    def count(self, batch: Any) -> float:
        """How many targets of `batch` count."""
        return float(self.kept(leaves(batch)[self.name]).numel())

    def kept(self, labels: Tensor) -> Tensor:
        """The targets in `labels` that count, in order."""
        return _kept(labels[..., self.first :] if labels.ndim > 1 else labels, self.ignored)


@dataclass(frozen=True)
class Share:
    """Of a part of a batch. own: targets that count in it, for each cross entropy; whole: in the batch. rows: what part
    of the batch's rows it has."""

    own: tuple[float, ...]
    whole: tuple[float, ...]
    rows: float


def labels_of(targets: Iterable[tuple[Tensor, int] | None], batch: Any) -> tuple[Labels, ...] | None:
    """Where in `batch` each cross entropy has its targets from; None where that is not known of one.

    targets: (targets, class that is ignored) of each; None where classes are weighed or targets are probabilities.
    """
    found = []
    for each in targets:
        source = None if each is None else _source(*each, batch)
        if source is None:
            return None
        found.append(source)
    return tuple(found) or None


def share_of(sources: Sequence[Labels], part: Any, whole: Sequence[float], rows: float) -> Share:
    """See Share."""
    return Share(tuple(source.count(part) for source in sources), tuple(whole), rows)


def _source(target: Tensor, ignored: int, batch: Any) -> Labels | None:
    kept = _kept(target, ignored)
    for name, labels in leaves(batch).items():
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or not labels.ndim:
            continue
        # Causal models shift their labels.
        for first in range(min(labels.ndim, 2)):
            source = Labels(name, first, ignored)
            found = source.kept(labels)
            if found.shape == kept.shape and torch.equal(found.to(kept), kept):
                return source
    return None


def _kept(labels: Tensor, ignored: int) -> Tensor:
    return labels[labels != ignored]
