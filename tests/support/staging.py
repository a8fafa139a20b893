"""Stages of a pipeline in one process: made as a strategy makes them, and chained by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.copies import homes, is_placeholder, replace_submodule, skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.proof.observe import tensors_in
from verify.models.specimens import Specimen

Stage = tuple[Staged, int]


def staged(model: nn.Module, chain: LayerChain, ranges: Sequence[tuple[int, int]]) -> Staged:
    """Return a rank's part, made as a strategy makes it: cut on the meta device, then given its weights."""
    part = Staged(skeleton_of(model), chain, ranges)
    weights = dict(model.named_parameters())
    held = homes(part.module)
    assert set(held) == part.holds == {name for name, _ in part.module.named_parameters()}
    assert all(is_placeholder(p) for p in part.module.parameters() if p.numel() > 1)
    for name, places in held.items():
        replace_submodule(
            places, nn.Parameter(weights[name].detach().clone(), requires_grad=weights[name].requires_grad)
        )
    return part


def chained(stages: Sequence[Stage], specimen: Specimen, value: Any, target: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return (output, name -> gradient summed over the stages). Pass hidden states and their gradients by hand."""
    for part, _ in stages:
        part.module.zero_grad()
    sent: Any = ()
    links: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for part, index in stages:
        received = tuple(t.detach().requires_grad_(t.requires_grad) for t in sent)
        links.append((sent, received))
        sent = part.forward(index, value, received)
    specimen.loss(sent, target).backward()
    for out, received in reversed(links):
        pairs = [(o, r.grad) for o, r in zip(out, received, strict=True) if o.requires_grad and r.grad is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    grads: dict[str, Tensor] = {}
    for part in {id(part): part for part, _ in stages}.values():
        for name, p in part.module.named_parameters():
            if p.grad is not None:
                grads[name] = grads[name] + p.grad if name in grads else p.grad.clone()
    return sent, grads


def assert_equal(found: tuple[Any, dict[str, Tensor]], whole: tuple[Any, dict[str, Tensor | None]]) -> None:
    for a, b in zip(tensors_in(found[0]), tensors_in(whole[0]), strict=True):
        assert (a - b).abs().max() <= 1e-12
    expected = {name: g for name, g in whole[1].items() if g is not None}
    assert found[1].keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert (found[1][name] - grad).abs().max() <= 1e-12 * scale, name


def partitions(num: int, stages: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise((0, *inner, num))) for inner in combinations(range(1, num), stages - 1)]
