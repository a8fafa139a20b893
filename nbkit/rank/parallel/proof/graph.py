"""The graph of autograd behind some tensors: gradients in it, and what it begins with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    of: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor | None] | None = None
) -> list[Tensor | None]:
    """Of the sum of `of`, each times its cotangent (without: a scalar), in `wanted`; None for what is not used.

    The graph stays.
    """
    given = cotangents if cotangents is not None else [None] * len(of)
    used = [(x, cotangent) for x, cotangent in zip(of, given, strict=True) if x.requires_grad]
    if not used or not wanted:
        return [None] * len(wanted)
    outputs = [x if cotangent is None else _weighed(x, cotangent) for x, cotangent in used]
    return list(torch.autograd.grad(outputs, list(wanted), retain_graph=True, allow_unused=True))


def run_backward(of: Sequence[Tensor]) -> None:
    """The backward pass of all of `of`, which require gradients: each gets ones."""
    torch.autograd.backward([_weighed(x, torch.ones_like(x)) for x in of])


def _weighed(x: Tensor, cotangent: Tensor) -> Tensor:
    """A scalar with that gradient. Given one that is no scalar's, torch imports its symbolic shapes, for a second."""
    found = x * cotangent.conj()
    return torch.view_as_real(found)[..., 0].sum() if found.is_complex() else found.sum()


def nodes_behind(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Every node of the graphs behind `tensors`, once; `variable` of a node is the leaf that it gives."""
    seen, waiting = set[Any](), [x.grad_fn for x in tensors if x.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions if before is not None]
