"""Test that every gradient of every model split over the tensor axis, in stages too, equals that of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.module.forward_wrapper import recompute
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.tensor.apply import tensor_parallel
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from verify.models.specimens import ZOO, Encoder, exact, gpt, hf_gpt2
from verify.tensor_split import axes_of, fill, shortened, specimen, whole_gradients

LIMIT = 1e-12
MODELS = ["gpt", "gpt2_padded", "llama_tied", "qwen2", "encoder", "uneven", "pairs", "sequential"]


def differences(world: Any, runs: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, float, float, int, int]]:
    found = []
    for name, options in runs:
        worst, loss, split, _ = specimen(world, name, **options)
        found.append((name, worst, loss, len(split.partial), sum(not x.is_whole for x in split.layouts.values())))
    return found


@pytest.mark.long
def test_gradients_on_two_ranks_equal_those_of_one_process() -> None:
    runs: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in MODELS]
    runs += [(name, {"sequence": False}) for name in ("gpt_tied", "llama")]
    answers = run_ranks(differences, 2, runs, timeout=150)[0]
    for name, worst, loss, _, _ in answers:
        assert worst <= LIMIT, name
        assert loss <= LIMIT, name
    partial = {name: num for name, _, _, num, _ in answers[: len(MODELS)]}
    # Norms and biases after a row map have partial gradients only if positions are split.
    assert partial == {
        "gpt": 24, "gpt2_padded": 24, "llama_tied": 8, "qwen2": 8, "encoder": 24, "uneven": 60, "pairs": 0,
        "sequential": 0,
    }  # fmt: skip
    assert all(num == 0 for _, _, _, num, _ in answers[len(MODELS) :])
    # Most tensors are split: all of Llama's except the norms.
    assert dict((name, cut) for name, _, _, _, cut in answers)["llama"] == 30


UNEQUAL = [("gpt2_padded", {"length": 13}), ("gpt", {"length": 1})]
ALSO_UNEQUAL = [("gpt2", {"length": 1}), ("gpt", {"length": 3, "sequence": False})]


@pytest.mark.long
@pytest.mark.parametrize("runs", [UNEQUAL, pytest.param(ALSO_UNEQUAL, marks=pytest.mark.long)])
def test_gradients_on_four_ranks_with_unequal_parts_equal_one_process(runs: list[tuple[str, dict[str, Any]]]) -> None:
    for name, worst, loss, _, _ in run_ranks(differences, 4, runs, timeout=150)[0]:
        assert worst <= LIMIT, name
        assert loss <= LIMIT, name


def dropping(name: str) -> nn.Module:
    if name == "encoder":
        model: nn.Module = Encoder(2)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.2
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.2
        return model
    if name == "gpt":
        return gpt(2, dropout=0.2)
    if name == "llama":
        from verify.models.tensor_odd import lora_llama

        return lora_llama(lora_dropout=0.2)
    return hf_gpt2(2, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)


def with_dropout(world: Any) -> list[tuple[str, float, float]]:
    """Return (model, largest difference / largest gradient, change of the loss by dropout) for each model."""
    found = []
    for name, sequence, again in (
        ("gpt", True, True), ("gpt2_padded", True, False), ("gpt2_padded", False, True), ("encoder", True, False),
        ("llama", True, False),
    ):  # fmt: skip
        spec = ZOO[name]
        torch.manual_seed(7)
        model = exact(dropping(name).double().train())
        value, target = spec.batch(3, dtype=torch.float64)
        whole = copy.deepcopy(model)
        with KeyedDropout(whole, 1).step(3, [4, 0, 2]):
            truth = spec.loss(call(whole, value), target)
        truth.backward()
        with torch.no_grad():
            plain = spec.loss(call(copy.deepcopy(model).eval(), value), target)
        part = skeleton_of(model)
        axes = axes_of(world)
        split = tensor_parallel(part, axes, sequence=sequence)
        fill(part, model, split)
        if again:
            recompute(part, [block for block in spec.blocks if block in dict(part.named_modules())])
        with KeyedDropout(part, 1).step(3, [4, 0, 2]):
            ours = spec.loss(call(part, value), target)
        ours.backward()
        group = axes.group("tp")
        assert group is not None
        gradients = whole_gradients(part, split, group)
        expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        scale = max(float(g.abs().max()) for g in expected.values())
        worst = max(float((gradients[name] - g).abs().max()) for name, g in expected.items())  # type: ignore[operator]
        found.append((name, worst / scale, abs(float(truth.detach() - plain))))
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_dropout_drops_the_same_elements_as_in_one_process() -> None:
    for name, worst, effect in run_ranks(with_dropout, 2, timeout=150)[0]:
        assert worst <= LIMIT, name
        assert effect > 1e-4, name


def staged(
    world: Any, name: str, sides: list[list[tuple[int, int]]], length: int = 16
) -> tuple[float, set[tuple[int, ...]]]:
    """Run the stages of all ranks in order. Return (largest difference / largest gradient, shapes between stages)."""
    spec = ZOO[name]
    model = spec.build(torch.float64)
    value, target = spec.batch(3, dtype=torch.float64)
    value, target = shortened(value, length), target[:, :length] if target.ndim == 2 else target
    _, expected = spec.gradients(copy.deepcopy(model), value, target)
    chain = find_chain(model, lambda: call(model, value))
    axes = axes_of(world)
    group = axes.group("tp")
    assert group is not None
    plan = plan_of(skeleton_of(model), group.size())
    made = []
    for ranges in sides:
        part = skeleton_of(model)
        stages = Staged(part, chain, ranges, team=group)
        split = tensor_parallel(part, axes, plan=plan)
        fill(part, model, split)
        made.append((part, stages, split))
    order = sorted((lo, side, i) for side, ranges in enumerate(sides) for i, (lo, _) in enumerate(ranges))
    tape: list[tuple[tuple[Tensor, ...], Any]] = []
    output: Any = ()
    for _, side, i in order:
        received = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
        output = made[side][1].forward(i, value, received)
        tape.append((received, output))
    spec.loss(output, target).backward()
    for (_, sent), (received, _) in zip(reversed(tape[:-1]), reversed(tape[1:]), strict=True):
        crossed = [(a, b.grad) for a, b in zip(sent, received, strict=True) if b.grad is not None]
        torch.autograd.backward([a for a, _ in crossed], [grad for _, grad in crossed])
    found: dict[str, Tensor] = {}
    for part, _, split in made:
        for key, grad in whole_gradients(part, split, group).items():
            if grad is not None:
                found[key] = found[key] + grad if key in found else grad
    gradients = {key: grad for key, grad in expected.items() if grad is not None}
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    worst = max(float((found[key] - grad).abs().max()) for key, grad in gradients.items())
    return worst / scale, {tuple(t.shape) for received, _ in tape for t in received if t.requires_grad}


INTERLEAVED, FOLDED = [[(0, 1), (2, 3)], [(1, 2), (3, 4)]], [[(0, 1), (3, 4)], [(1, 2), (2, 3)]]
RUNS = [
    ("gpt_tied", INTERLEAVED, 16),
    ("encoder", FOLDED, 16),
    ("gpt2_padded", INTERLEAVED, 13),
    ("gpt_tied", FOLDED, 1),
]
ALSO = [("gpt2_padded", FOLDED, 16), ("llama", INTERLEAVED, 16)]


def every(world: Any, runs: list[Any]) -> list[tuple[float, set[tuple[int, ...]]]]:
    return [staged(world, *run) for run in runs]


@pytest.mark.parametrize("runs", [RUNS, pytest.param(ALSO, marks=pytest.mark.long)])
def test_gradients_of_split_stages_equal_those_of_one_process(runs: list[Any]) -> None:
    for rank, found in enumerate(run_ranks(every, 2, runs, timeout=150)):
        assert all(worst <= 1e-12 for worst, _ in found)
        # 13 positions do not divide evenly, and a single position is sent whole.
        lengths = {16: 8, 13: [7, 6][rank], 1: 1}
        assert [shapes for _, shapes in found] == [{(3, lengths[length], 32)} for _, _, length in runs]
