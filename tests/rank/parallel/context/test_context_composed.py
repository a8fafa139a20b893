"""Context parallelism together with a pipeline's stages, with tensor parallelism, recomputation and dropout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.mesh import Mesh
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.context.context_parallel import context_parallel
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.copies import homes, skeleton_of
from nbkit.rank.parallel.module.forward_wrapper import recompute
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.tensor.apply import tensor_parallel
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.tensor_layout import Layout
from verify.models.specimens import ZOO, gpt


def build(name: str) -> nn.Module:
    if name != "gpt":
        return ZOO[name].build(torch.float64)
    model = gpt(dropout=0.2).double()
    model.load_state_dict(ZOO["gpt"].build(torch.float64).state_dict())
    return model


def truth(name: str, value: Any, target: Any) -> dict[str, Tensor]:
    """Gradients of one process, dropout included."""
    model = build(name)
    with KeyedDropout(model, 5).step(7, range(3)):
        ZOO[name].loss(call(model, value), target).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def stages(world: Any) -> dict[str, float]:
    """Two stages, one after the other on each rank, tensors and gradients passed by hand."""
    axes, found = Axes.of(Mesh(cp=2), world.place.rank), {}
    for name in ("gpt_tied", "pairs"):
        specimen = ZOO[name]
        value, target = specimen.batch(3, dtype=torch.float64)
        expected = truth(name, value, target)
        model = build(name)
        chain = find_chain(model, lambda model=model, value=value: call(model, value))
        half, total = len(chain) // 2, dict.fromkeys(expected, torch.zeros(()))
        parts = []
        for lo, hi in ((0, half), (half, len(chain))):
            staged = Staged(copy.deepcopy(model), chain, [(lo, hi)])
            split = context_parallel(staged.module, axes, chain.blocks, held=chain.blocks[lo:hi])
            recompute(staged.module, chain.blocks[lo:hi])
            parts.append((staged, split, KeyedDropout(staged.module, 5)))
        (first, _, keyed), (last, _, keyed_last) = parts
        with keyed.step(7, range(3)):
            sent = first.forward(0, value, ())
        assert all(x.shape[1] == 8 for x in sent)
        received = [x.detach().requires_grad_(x.is_floating_point()) for x in sent]
        with keyed_last.step(7, range(3)):
            loss = specimen.loss(last.forward(0, value, received), target)
        loss.backward()
        torch.autograd.backward(sent, [x.grad for x in received])
        for staged, split, _ in parts:
            for path, places in homes(staged.module).items():
                param = places[0][0]._parameters[places[0][1]]
                if path in split.partial:
                    dist.all_reduce(param.grad, group=axes.group("cp"))
                # A tied weight goes by the name of the first place that is held.
                name_in_whole = path if path in staged.holds else next(iter(staged.holds - set(homes(staged.module))))
                total[name_in_whole] = total[name_in_whole] + param.grad
        found[name] = _difference({n: (total[n], g) for n, g in expected.items()})
    return found


def tensors(world: Any, cases: list[tuple[str, bool]]) -> dict[str, float]:
    axes, found = Axes.of(Mesh(cp=2, tp=2), world.place.rank), {}
    for name, sequence in cases:
        specimen = ZOO[name]
        value, target = specimen.batch(3, dtype=torch.float64)
        expected, model = truth(name, value, target), build(name)
        of_tp = tensor_parallel(model, axes, sequence=sequence)
        of_cp = context_parallel(model, axes, specimen.blocks)
        if sequence:
            recompute(model, specimen.blocks)
        with KeyedDropout(model, 5).step(7, range(3)):
            specimen.loss(call(model, value), target).backward()
        pairs = {}
        for path, param in model.named_parameters():
            for axis, partial in (("tp", of_tp.partial), ("cp", of_cp.partial)):
                if path in partial:
                    dist.all_reduce(param.grad, group=axes.group(axis))
            pairs[path] = (param.grad, _local(expected[path], of_tp.layouts[path]))
        found[f"{name} sequence={sequence}"] = _difference(pairs)
    return found


def shards(world: Any, zeros: tuple[int, ...]) -> dict[int, float]:
    """dp=2 cp=2, a micro-batch per row, blocks recomputed; the weights of the whole model put into each shard."""
    axes, specimen = Axes.of(Mesh(dp=2, cp=2), world.place.rank), ZOO["gpt"]
    ids, target = specimen.batch(3, dtype=torch.float64)
    expected, whole, found = truth("gpt", ids, target), build("gpt"), {}
    for zero in zeros:
        model = skeleton_of(whole)
        split = context_parallel(model, axes, specimen.blocks)
        recompute(model, specimen.blocks)
        layouts = {name: Layout.whole(p.shape) for name, p in model.named_parameters()}
        blocks = [model.get_submodule(name) for name in specimen.blocks]
        data = data_axis(model, layouts, axes, zero=zero, units=blocks)
        for name, (held, layout) in data.weights.items():
            held.data.copy_(_local(whole.get_parameter(name).detach(), layout))
        data.refresh()
        data.reset(passes=2)
        rows = ([0, 1], [2])[axes.index("dp")]
        for row in rows:
            with KeyedDropout(model, 5).step(7, [row]):
                loss = specimen.loss(model(ids[[row]]), target[[row]]) / 3
            if row == rows[-1]:
                data.start()
            loss.backward()
            if row != rows[-1]:
                data.hold()
        data.finish()
        pairs = {}
        for name, param in data.held.items():
            if name in split.partial:
                dist.all_reduce(param.grad, group=axes.group("cp"))
            pairs[name] = (param.grad, _local(expected[name], data.layouts[name]))
        found[zero] = _difference(pairs)
    return found


def _local(whole: Tensor, layout: Layout) -> Tensor:
    local = whole.new_zeros(layout.local)
    for here, there in layout.pieces:
        local[here.slices] = whole[there.slices]
    return local


def _difference(pairs: dict[str, tuple[Tensor, Tensor]]) -> float:
    wrong = sum(float((a - b).square().sum()) for a, b in pairs.values())
    return (wrong / sum(float(b.square().sum()) for _, b in pairs.values())) ** 0.5


def test_stages_of_a_pipeline_pass_parts_of_the_positions() -> None:
    for found in run_ranks(stages, 2, timeout=170):
        assert {name: wrong for name, wrong in found.items() if not wrong <= 1e-12} == {}


@pytest.mark.parametrize(
    "cases", [[("gpt", False), ("llama_tied", True)], pytest.param([("encoder", True)], marks=pytest.mark.long)]
)
def test_with_tensor_parallelism(cases: list[tuple[str, bool]]) -> None:
    for found in run_ranks(tensors, 4, cases, timeout=170):
        assert {name: wrong for name, wrong in found.items() if not wrong <= 1e-12} == {}


@pytest.mark.parametrize("zeros", [(3,), pytest.param((0,), marks=pytest.mark.long)])
def test_with_a_data_axis(zeros: tuple[int, ...]) -> None:
    for found in run_ranks(shards, 4, zeros, timeout=170):
        assert {zero: wrong for zero, wrong in found.items() if not wrong <= 1e-12} == {}
