"""The choices of a user beside the strategy. They are the same for every strategy, and may change within a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class JobOptions:
    """The choices of a user that decide, with the strategy, what a rank computes.

    tp_plan: see tensor.choose. recompute: compute the activations of the blocks again in the backward pass. cut: a rank
    cuts its rows into several forwards, whatever the strategy. loss_chunks: pieces of the logits. compile: compile
    blocks where that is safe. adaptive: the optimizer's steps do not grow with the gradients, as with Adam.
    own_forward: the user calls the model. whole: parameters that the optimizer can only update whole, as Muon does with
    matrices. whole_in_tp: these, and parameters that it can update in rows but not in columns.
    """

    tp_plan: Mapping[str, str] | None = None
    recompute: bool = False
    cut: bool = False
    loss_chunks: int = 1
    compile: bool | str = False
    adaptive: bool = False
    own_forward: bool = False
    whole: frozenset[str] = frozenset()
    whole_in_tp: frozenset[str] = frozenset()
