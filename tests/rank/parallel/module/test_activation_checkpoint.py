"""Activation checkpointing gives the same gradients, and computes once more in backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.forward_wrapper import recompute
from nbkit.rank.rng.draw_plan import extent, extent_of
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from verify.models.specimens import ZOO, gpt


def gradients(name: str, *, checkpoint: bool, thread: bool = False) -> tuple[list[Tensor | None], list[str]]:
    """Return the gradients of two micro-batches, and the blocks in the order in which they were computed. The backward
    passes follow both forwards."""
    specimen = ZOO[name]
    model = gpt(dropout=0.3).double() if name == "gpt" else specimen.build(torch.float64)
    if name == "gpt":
        model.load_state_dict(specimen.build(torch.float64).state_dict())
    value, target = specimen.batch(4, dtype=torch.float64)
    computed: list[str] = []
    for block in specimen.blocks:
        leaf = next(part for part in model.get_submodule(block).modules() if part._parameters)
        leaf.register_forward_pre_hook(lambda *_, block=block: computed.append(block))
    if checkpoint:
        recompute(model, specimen.blocks)
    keyed = KeyedDropout(model, seed=3)
    losses = []
    for rows in ((0, 1, 2), (3,)):
        with keyed.step(2, rows), extent("head", 1, 5):
            output = call(model, _rows(value, list(rows)))
            losses.append(specimen.loss(output, target[list(rows)]))
    assert extent_of("head") is None
    # Go backward through the second first: by then dropout, rows and calls of the first pass have long changed.
    for loss in reversed(losses):
        if thread:
            other = threading.Thread(target=loss.backward)
            other.start()
            other.join()
        else:
            loss.backward()
    return [p.grad for p in model.parameters()], computed


def _rows(value: Any, rows: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    return {k: _rows(x, rows) for k, x in value.items()} if isinstance(value, dict) else tuple(x[rows] for x in value)


@pytest.mark.parametrize("name", ["gpt", "llama_tied", "gpt2_padded", "encoder", "pairs"])
def test_the_gradients_are_the_same(name: str) -> None:
    expected, once = gradients(name, checkpoint=False)
    assert all(grad is not None and bool(grad.any()) for grad in expected) or name != "gpt"
    for thread in (False, True):
        found, computed = gradients(name, checkpoint=True, thread=thread)
        assert computed == [*once, *[b for _ in range(2) for b in reversed(ZOO[name].blocks)]]
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def saved_bytes(checkpoint: bool) -> int:
    """Return the bytes of all that autograd keeps between forward and backward."""
    model, (ids, _) = gpt(layers=8), ZOO["gpt"].batch(8)
    if checkpoint:
        recompute(model, ZOO["gpt"].blocks + tuple(f"blocks.{i}" for i in range(4, 8)))
    held: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(ids)
    return sum(held.values())


def test_activations_are_not_kept() -> None:
    assert saved_bytes(checkpoint=True) < 0.4 * saved_bytes(checkpoint=False)


def test_names_hooks_and_evaluation_stay() -> None:
    model, (ids, _) = gpt(), ZOO["gpt"].batch(2)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        expected = model(ids)
        recompute(model, ZOO["gpt"].blocks)
        assert torch.equal(model(ids), expected)

    assert [name for name, _ in model.named_parameters()] == names


def test_blocks_whose_parameters_are_there_only_while_they_work() -> None:
    """A sharded data axis works so: a hook makes a block's parameters whole, and again before its backward."""
    specimen = ZOO["gpt"]
    ids, target = specimen.batch(2, dtype=torch.float64)
    truth, model = specimen.build(torch.float64), specimen.build(torch.float64)
    specimen.loss(truth(ids), target).backward()
    recompute(model, specimen.blocks)
    for name in specimen.blocks:
        _shard(model.get_submodule(name))
    specimen.loss(model(ids), target).backward()

    for p, reference in zip(model.parameters(), truth.parameters(), strict=True):
        assert torch.equal(p.grad, reference.grad)


def _shard(block: nn.Module) -> None:
    kept = [p.detach().clone() for p in block.parameters()]

    def gather(*_: Any) -> None:
        for p, whole in zip(block.parameters(), kept, strict=True):
            p.untyped_storage().resize_(whole.untyped_storage().nbytes())
            p.data.copy_(whole)

    def free(*_: Any) -> None:
        for p in block.parameters():
            p.untyped_storage().resize_(0)

    def after(_: nn.Module, __: Any, output: Tensor) -> None:
        free()
        output.register_hook(gather)

    free()
    block.register_forward_pre_hook(gather)
    block.register_forward_hook(after)
