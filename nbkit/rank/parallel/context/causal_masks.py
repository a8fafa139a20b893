"""Masks of causal attention from some of the positions, which the blocks of a model share while a pass needs them.

A kernel keeps for backward the mask it was given, and makes one of floats of what is bool: a mask for each block would
soon be larger than all else that a block keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from nbkit.tensor_layout import Runs


class CausalMasks:
    """Each is made once, and gone when nothing holds it any more."""

    def __init__(self) -> None:
        self._made: dict[Any, TensorWeakRef] = {}

    def of(self, runs: Runs, query: Tensor) -> Tensor:
        """(queries, keys): 0 where a query at the positions `runs` may look at a key, -inf where not.

        Keys are those up to the last query; dtype and device are those of `query`.
        """
        kind = runs, query.dtype, query.device
        made = self._made[kind]() if kind in self._made else None
        if made is None:
            rows = torch.cat([torch.arange(start, stop, device=query.device) for start, stop in runs])
            later = rows[:, None] < torch.arange(runs[-1][1], device=query.device)
            made = torch.zeros(later.shape, dtype=query.dtype, device=query.device).masked_fill_(later, -torch.inf)
            # Those of other lengths are not needed again.
            self._made = {kind: ref for kind, ref in self._made.items() if ref() is not None}
            self._made[kind] = TensorWeakRef(made)
        return made
