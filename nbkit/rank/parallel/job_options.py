"""The choices of a user, besides the strategy, that decide what a rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class JobOptions:
    """The choices of a user that decide, together with the strategy, what a rank computes.

    tp_plan: see choose_plan.py. recompute: compute the activations of blocks again in the backward pass; see Compute.
    fp8: compute linear layers of blocks in fp8. cut: a rank splits its rows into several forward passes, with any
    strategy. loss_chunks: number of pieces of the logits. compile: compile blocks where that is safe. adaptive: the
    size of the optimizer's steps does not grow with the gradients, as with Adam. own_forward: the user calls the model.
    whole: parameters that the optimizer can only update whole, as Muon does with matrices. whole_in_tp: these, and
    parameters that it can update if their rows are split, but not if their columns are split.
    """

    tp_plan: Mapping[str, str] | None = None
    recompute: bool | str = False
    fp8: bool = False
    cut: bool = False
    loss_chunks: int = 1
    compile: bool | str = False
    adaptive: bool = False
    own_forward: bool = False
    whole: frozenset[str] = frozenset()
    whole_in_tp: frozenset[str] = frozenset()
