"""Test that context parallelism gives the gradients of one process, with a part of the positions on each rank."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pretend
import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from nbkit.errors import StrategyError
from nbkit.mesh import Mesh
from nbkit.rank.comm import delegating_group
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.context.context_parallel import Positionwise, context_parallel
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.forward_wrapper import recompute
from nbkit.rank.parallel.pipeline.executor import backward_input, enter
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.torch_private import cpu_attention
from nbkit.rank.train.estimate.model_trace import LiveBytes
from nbkit.rank.watching_mode import WatchingMode
from verify.models.specimens import (
    HEADS,
    KV_HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    ZOO,
    Encoder,
    Specimen,
    classes,
    cross_entropy,
    next_tokens,
)


class Causal(Encoder):
    """A model from token ids (B, T) to logits (B, T, V), through an nn.TransformerEncoder with its own mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB)
        for part in self.encoder.modules():
            if isinstance(part, nn.Dropout):
                part.p = dropout
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = dropout

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=padding is None, src_key_padding_mask=padding))


class Modulated(nn.Module):
    """A model whose blocks also take a vector per sample and a table per position, both trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.gate, self.table = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList(ModulatedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.gate(ids[:, 0]), table=self.table[:, : ids.shape[1]])
        return self.head(x)


class ModulatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ZOO["gpt"].make().blocks[0]

    def forward(self, x: Tensor, gate: Tensor, *, table: Tensor) -> Tensor:
        return self.inner(x * gate[:, None] + table)


class Documents(nn.Module):
    """A model with grouped heads. Block 1 sees the last 5 positions of a document, block 2 all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Grouped() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        document = (ids < VOCAB // 4).cumsum(1)
        near = (at[:, None] >= at) & (at[:, None] < at + 5)
        mask = near & (document[:, :, None] == document[:, None])
        x = self.blocks[0](self.tokens(ids), mask=mask[:, None])
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * KV_HEADS * size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * KV_HEADS, -1)).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class MasksItself(nn.Module):
    """A block that makes a causal mask for the positions that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)[:, None]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + F.scaled_dot_product_attention(q, q, q, mask)[:, 0]


def gpt_that_drops() -> nn.Module:
    return ZOO["gpt"].make.__globals__["gpt"](dropout=0.2)


def encoder_that_drops() -> nn.Module:
    return Causal(dropout=0.2)


BALANCED = Positionwise(balanced=True)
BLOCKS = tuple(f"encoder.layers.{i}" for i in range(4))
MORE = {
    "causal encoder": Specimen(Causal, next_tokens, cross_entropy, BLOCKS),
    "modulated": Specimen(Modulated, next_tokens, cross_entropy, ("blocks.0", "blocks.1")),
    "documents": Specimen(Documents, next_tokens, cross_entropy, ("blocks.0", "blocks.1", "blocks.2")),
    "gpt that drops": Specimen(gpt_that_drops, next_tokens, cross_entropy, ZOO["gpt"].blocks),
    "encoder that drops": Specimen(encoder_that_drops, next_tokens, cross_entropy, BLOCKS),
}


def shorter(value: Any, length: int) -> Any:
    """Return the first `length` positions of inputs and targets."""
    if isinstance(value, Tensor):
        return value[:, :length] if value.ndim > 1 else value
    return (
        type(value)(shorter(x, length) for x in value)
        if isinstance(value, tuple)
        else {key: shorter(x, length) for key, x in value.items()}
    )


def difference(
    name: str, axes: Axes, length: int, checkpoint: bool = False, balanced: bool = False, trained: str = ""
) -> float:
    """Return ||gradients of the split model - those of the whole|| / ||those||, on this rank, after the sum over cp.

    balanced: a rank's part is a chunk from the head and one from the tail. trained: words; train only parameters whose
    names contain one of them ("": all).
    """
    specimen = {**ZOO, **MORE}[name]
    value, target = specimen.batch(3, dtype=torch.float64)
    value, target = shorter(value, length), shorter(target, length)
    truth, model = specimen.build(torch.float64), specimen.build(torch.float64)
    for part in (truth, model):
        for path, param in part.named_parameters():
            param.requires_grad_(not trained or any(word in path for word in trained.split()))
    with KeyedDropout(truth, 5).step(7, range(3)):
        expected, _ = specimen.gradients(truth, value, target)
    split = context_parallel(model, axes, specimen.blocks, tried=BALANCED if balanced else None)
    if checkpoint:
        recompute(model, specimen.blocks)
    with KeyedDropout(model, 5).step(7, range(3)):
        output = call(model, value)
        specimen.loss(output, target).backward()
    wrong = whole = 0.0
    for (name, param), reference in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert (param.grad is None) == (not param.requires_grad)
        if param.grad is None:
            continue
        if name in split.partial:
            dist.all_reduce(param.grad, group=axes.group("cp"))
        wrong += float((param.grad - reference.grad).square().sum())
        whole += float(reference.grad.square().sum())
    got, wanted = (getattr(x, "logits", x) for x in (output, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    return (wrong / whole) ** 0.5


def every_model(world: Any, cases: list[Any]) -> dict[Any, float]:
    axes = Axes.of(Mesh(cp=world.place.world_size), world.place.rank)
    return {case: difference(case[0], axes, *case[1:]) for case in cases}


NAMES = (
    *("gpt_tied", "llama", "llama_tied", "qwen2", "gpt2_padded", "encoder", "causal encoder", "modulated"),
    "documents",
)


# Each model is tested once. 15 positions are 8 + 7. If balanced, one rank has positions 0 to 3 and 12 to 15 of 16, and
# the other 4 to 11. Chunks and parts of 15 and 13 positions have unequal lengths. The third value turns recomputation
# on.
ON_TWO = [
    *((name, LENGTH, False) for name in ("qwen2", "modulated")),
    *((name, LENGTH - 1, False) for name in ("gpt", "causal encoder")),
    *(("gpt that drops", LENGTH - 1, True), ("encoder that drops", LENGTH - 1, False)),
    *((name, LENGTH, False, True) for name in ("gpt2_padded", "encoder")),
    *((name, 13, False, True) for name in ("gpt_tied", "llama_tied", "modulated")),
    ("encoder that drops", LENGTH - 1, True, True),
    *(("documents", LENGTH - 1, False), ("documents", 13, True, True)),
    # Some blocks need no gradient of keys and values, some need none at all, and some train only keys or values.
    *(("gpt", LENGTH, again, True, "0.attention.q 2.attention.q head") for again in (False, True)),
    *(("gpt", 13, False, True, "3.up"), ("gpt", LENGTH, False, False, "1.attention.k 2.attention.v")),
    ("encoder", LENGTH, True, False, "2.linear1 3.self_attn"),
]
ALL_ON_TWO = [
    *((name, LENGTH, False) for name in NAMES),
    *((name, LENGTH - 1, False) for name in ("gpt", "llama_tied", "encoder", "causal encoder", "modulated")),
    *((name, LENGTH - 1, again) for name in ("gpt that drops", "encoder that drops") for again in (False, True)),
    *((name, length, False, True) for length in (LENGTH, 13) for name in NAMES),
    *((name, LENGTH - 1, True, True) for name in ("gpt", "gpt that drops", "encoder that drops")),
]


@pytest.mark.parametrize("cases", [ON_TWO, pytest.param(ALL_ON_TWO, marks=pytest.mark.long)])
def test_gradients_equal_those_of_one_process(cases: list[Any]) -> None:
    for found in run_ranks(every_model, 2, cases, timeout=170):
        assert {case: wrong for case, wrong in found.items() if not wrong <= 1e-12} == {}


# Parts of equal and of unequal length, in order and balanced, with dropout and recomputation.
ON_FOUR = [("encoder", LENGTH, False), ("gpt that drops", 10, True), ("causal encoder", 13, True, True)]
ALSO_ON_FOUR = [
    *(("gpt", 14, False, balanced) for balanced in (False, True)),
    *(("causal encoder", 13, True), ("encoder", LENGTH, False, True), ("gpt that drops", 10, True, True)),
    *(("gpt", 8, False, True), ("llama", LENGTH, False, True)),
]


@pytest.mark.long  # tests/verify has four ranks
@pytest.mark.parametrize("cases", [ON_FOUR, ALSO_ON_FOUR])
def test_gradients_on_four_ranks_equal_those_of_one_process(cases: list[Any]) -> None:
    for found in run_ranks(every_model, 4, cases, timeout=170):
        assert {case: wrong for case, wrong in found.items() if not wrong <= 1e-12} == {}


def kept_by_a_block(at: Any, pretended: bool, names: tuple[str, ...]) -> dict[str, float]:
    """Return {model: bytes kept for backward by its second block on this rank, times cp, over those in one process}.

    pretended: on the pretended GPU, where `at` is the rank.
    """
    if not pretended:
        return _kept(at, names)
    world, gpu = pretend.join(at, 4)
    with pretend.checked(gpu):
        return _kept(world, names)


def _settled(live: LiveBytes) -> int:
    """Return the live bytes, once gloo's threads have released the buffers of collectives that are complete."""
    now = -1
    while now != live.now:
        now = live.now
        time.sleep(0.02)
    return now


def _kept(world: Any, names: tuple[str, ...]) -> dict[str, float]:
    size, found = world.place.world_size, {}
    for name in names:
        specimen, kept = {**ZOO, **MORE}[name], []
        value, target = specimen.batch(2, dtype=torch.float64)
        for split in (False, True):
            model = specimen.build(torch.float64)
            if split:
                axes = Axes.of(Mesh(cp=size), world.place.rank)
                context_parallel(model, axes, specimen.blocks, tried=BALANCED if name != "encoder" else None)
            levels: list[int] = []
            live = LiveBytes(model.parameters(), counted=False)
            for block in specimen.blocks[1:3]:
                model.get_submodule(block).register_forward_pre_hook(lambda *_: levels.append(_settled(live)))  # noqa: B023
            with live:
                loss = specimen.loss(call(model, value), target)
            kept.append(levels[1] - levels[0])
            loss.backward()
        found[name] = size * kept[1] / kept[0]
    return found


def dropped(world: Any) -> bool:
    """Return True if a block's input is freed when the loss is deleted without a backward pass."""
    specimen, inputs = ZOO["gpt"], []
    value, target = specimen.batch(2)
    model = specimen.build()
    context_parallel(model, Axes.of(Mesh(cp=2), world.place.rank), specimen.blocks, tried=BALANCED)
    block = model.get_submodule(specimen.blocks[1])
    block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = specimen.loss(call(model, value), target)
    assert inputs[0]() is not None and loss.requires_grad
    del loss
    gc.collect()
    return inputs[0]() is None


def test_a_forward_without_backward_is_freed() -> None:
    assert run_ranks(dropped, 2) == [True, True]


KEEPING = ("gpt", "llama", "documents", "causal encoder", "encoder")


@pytest.mark.parametrize("pretended", [False, True])
def test_a_rank_keeps_no_keys_and_values_of_other_ranks_for_backward(pretended: bool) -> None:
    # A GPT block keeps 16 tensors with this rank's positions. Keys and values of three other ranks would be 6 more.
    for found in run_ranks(kept_by_a_block, 4, pretended, KEEPING, join=not pretended):
        assert {name: share for name, share in found.items() if not 0.8 < share <= 1.05} == {}


def sent(world: Any) -> dict[str, dict[str, int]]:
    """Return {mode: operations along cp in a forward and backward pass of a GPT with four blocks}."""
    specimen, axes = ZOO["gpt"], Axes.of(Mesh(cp=2), world.place.rank)
    value, target = specimen.batch(2)
    heard: list[str] = []
    delegating_group.listeners.append(lambda operation, *_: heard.append(operation))
    found = {}
    for way in ("plain", "recompute", "evaluation"):
        model = specimen.build()
        context_parallel(model, axes, specimen.blocks, tried=BALANCED)
        if way == "recompute":
            recompute(model, specimen.blocks)
        heard.clear()
        with torch.set_grad_enabled(way != "evaluation"):
            loss = specimen.loss(call(model, value), target)
        if way != "evaluation":
            loss.backward()
        found[way] = dict(Counter(heard))
    return found


def test_backward_gathers_keys_and_values_again() -> None:
    # One more gather joins the output of the last block, which is not recomputed. Another joins the gradients of the
    # first block's input.
    for found in run_ranks(sent, 2):
        assert found == {
            "plain": {"all_gather": 2 * 4 + 2, "reduce_scatter": 4},
            "recompute": {"all_gather": 3 * 4 + 2, "reduce_scatter": 4},
            "evaluation": {"all_gather": 4 + 1},
        }


def in_two_passes(world: Any) -> list[float]:
    """Return the largest differences of gradients from those of one backward pass.

    First for I and W of a zero-bubble pipeline, then for the mean of two backward passes through the same graph.
    """
    specimen, axes = ZOO["gpt"], Axes.of(Mesh(cp=2), world.place.rank)
    value, target = specimen.batch(2, dtype=torch.float64)
    grads = []
    for way in ("once", "in two parts", "twice"):
        model = specimen.build(torch.float64)
        context_parallel(model, axes, specimen.blocks, tried=BALANCED)
        hidden = model.tokens(value).detach().requires_grad_()
        (x,) = enter([hidden])
        for block in model.blocks:
            x = block(x)
        loss = specimen.loss(model.head(x), target)
        if way == "in two parts":
            backward_input([get_gradient_edge(loss)], [torch.ones_like(loss)], [hidden]).run()
        else:
            if way == "twice":
                (loss / 2).backward(retain_graph=True)
            (loss / 2 if way == "twice" else loss).backward()
        grads.append([hidden.grad, *(p.grad for p in (*model.blocks.parameters(), *model.head.parameters()))])
    return [max(float((a - b).abs().max()) for a, b in zip(grads[0], others, strict=True)) for others in grads[1:]]


def test_a_split_backward_and_two_backward_passes_give_the_same_gradients() -> None:
    for found in run_ranks(in_two_passes, 2):
        assert max(found) <= 1e-14


class Overwriting(nn.Module):
    """A block that changes in place a tensor that attention needs for backward."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.inner, self.which = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), which

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.inner)
        y = F.scaled_dot_product_attention(q, k, v)
        (q, k, v, y)[self.which].mul_(2)
        return y.transpose(1, 2).flatten(2)


def overwrite(world: Any) -> list[str]:
    said = []
    for which in range(4):
        model = nn.Sequential(Overwriting(which))
        context_parallel(model, Axes.of(Mesh(cp=2), world.place.rank), ["0"])
        with pytest.raises(RuntimeError) as refused:
            model(torch.randn(2, 8, WIDTH)).sum().backward()
        said.append(str(refused.value))
    return said


def test_an_in_place_change_of_a_tensor_for_backward_raises_torchs_error() -> None:
    for said in run_ranks(overwrite, 2):
        assert all("modified by an inplace operation" in text for text in said), said


class Pairs(WatchingMode):
    """A mode that counts the (query, key) pairs of attention, its kernel calls, and the calls with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.calls, self.masked = 0.0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is cpu_attention:
            causal, queries, keys = len(args) > 4 and args[4], args[0].shape[-2], args[1].shape[-2]
            self.count += queries * (queries + 1) / 2 if causal else queries * keys
            self.calls += 1
            self.masked += (kwargs or {}).get("attn_mask") is not None
        return func(*args, **(kwargs or {}))


def pairs_of_a_pass(world: Any) -> dict[bool, tuple[float, int, int]]:
    """Return {balanced: (pairs, kernel calls, calls with a mask)} of a forward pass on this rank."""
    axes, found = Axes.of(Mesh(cp=world.place.world_size), world.place.rank), {}
    for balanced in (True, False):
        model = ZOO["gpt"].build()
        context_parallel(model, axes, ZOO["gpt"].blocks, tried=BALANCED if balanced else None)
        with Pairs() as seen:
            model(ZOO["gpt"].batch(2)[0])
        found[balanced] = seen.count, seen.calls, seen.masked
    return found


def test_balanced_ranks_attend_to_equal_numbers_of_pairs_without_masks() -> None:
    found = run_ranks(pairs_of_a_pass, 4)
    for balanced, most in ((True, 1.0), (False, 7 / 4)):
        pairs = [rank[balanced][0] for rank in found]
        assert max(pairs) / (sum(pairs) / 4) == pytest.approx(most, rel=0.05), pairs
        assert all(rank[balanced][1] and not rank[balanced][2] for rank in found), found


def evaluate(world: Any) -> list[float]:
    """Return the largest differences of outputs of two models in eval mode without gradients, down to length 1."""
    axes = Axes.of(Mesh(cp=2), world.place.rank)
    found = []
    for name in ("gpt", "encoder"):
        specimen = ZOO[name]
        truth, model = specimen.build(torch.float64).eval(), specimen.build(torch.float64).eval()
        # torch's nested path returns zeros for padding. This is not the function that is trained.
        if name == "encoder":
            truth.encoder.use_nested_tensor = False
        context_parallel(model, axes, specimen.blocks, tried=BALANCED if name == "gpt" else None)
        value, _ = specimen.batch(2)
        for length in (LENGTH, 5, 3, 1):
            with torch.no_grad():
                some = shorter(value, length)
                found.append(float((call(model, some) - call(truth, some)).abs().max()))
    return found


def test_outputs_in_evaluation_are_right_down_to_one_position() -> None:
    for found in run_ranks(evaluate, 2):
        assert max(found) <= 1e-12


def refuse(world: Any) -> list[str]:
    axes = Axes.of(Mesh(cp=2), world.place.rank)
    said = []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS), 2)
    shared = ZOO["gpt"].build()
    shared.head.weight = shared.blocks[0].attention.q.weight
    eager = ZOO["gpt"].build()
    eager.config = SimpleNamespace(_attn_implementation="eager")  # like Hugging Face models
    for model, blocks in (
        (ZOO["ten_convs"].build(), ZOO["ten_convs"].blocks),
        (encoder, ["layers.0", "layers.1"]),
        (shared, ZOO["gpt"].blocks),
        (eager, ZOO["gpt"].blocks),
        (ZOO["gpt"].build(), []),
    ):
        with pytest.raises(StrategyError) as refused:
            context_parallel(model, axes, blocks)
        said.append(str(refused.value))
    for name, value in (("sequential", classes(6)(2, torch.Generator())[0]), ("gpt", torch.zeros(2, 3).long())):
        model = ZOO[name].build()
        context_parallel(model, axes, ZOO[name].blocks)
        with pytest.raises(StrategyError) as refused:
            model(value)
        said.append(str(refused.value))
    for model in (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(MasksItself(), MasksItself())):
        context_parallel(model, axes, ["0", "1"])
        with pytest.raises(StrategyError) as refused:
            model(torch.zeros(2, 8, 4))
        said.append(str(refused.value))
    return said


def test_modules_that_mix_positions_outside_attention_are_refused_by_name() -> None:
    convs, turned, shared, eager, chain, flat, short, none, mask = run_ranks(refuse, 2)[0]

    assert "'convs.0.0' combines positions" in convs and "Conv2d" in convs
    assert "'layers.0.self_attn'" in turned and "batch_first=True" in turned
    assert "'blocks.0.attention.q.weight' is used both inside and outside of the blocks" in shared
    assert "attn_implementation='eager'" in eager
    assert "needs to know the blocks of the model" in chain
    assert "does not take hidden states" in flat
    assert "3 positions over cp=2" in short
    assert "'0' does not call an attention function" in none
    assert "'0' makes a mask for the positions of one rank" in mask and "4 x 4" in mask


def forget_the_sum(world: Any) -> float:
    """Leave out the sum over cp of the blocks' gradients (a planted bug). Return the smallest difference it makes."""
    specimen, axes = ZOO["gpt"], Axes.of(Mesh(cp=2), world.place.rank)
    value, target = specimen.batch(3, dtype=torch.float64)
    _, expected = specimen.gradients(specimen.build(torch.float64), value, target)
    model = specimen.build(torch.float64)
    split = context_parallel(model, axes, specimen.blocks)
    specimen.loss(call(model, value), target).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert all(torch.allclose(grads[name], expected[name]) for name in expected if name not in split.partial)
    return min(float((grads[name] - expected[name]).abs().max()) for name in split.partial if "k.bias" not in name)


def test_every_parameter_marked_partial_needs_the_sum_over_cp() -> None:
    for wrong in run_ranks(forget_the_sum, 2):
        assert wrong > 1e-8


def test_a_model_on_a_single_rank_is_not_changed() -> None:
    found = run_ranks(alone, 1)
    assert found == [(frozenset(), True)]


def alone(world: Any) -> tuple[frozenset[str], bool]:
    model = ZOO["gpt"].build()
    split = context_parallel(model, Axes.of(Mesh(), 0), ZOO["gpt"].blocks)
    return split.partial, not any("forward" in vars(block) for block in model.blocks)


def test_a_failure_has_the_error_of_the_rank() -> None:
    with pytest.raises(RankFailed, match="two positions for each rank"):
        run_ranks(every_model, 2, [("gpt", 3, False)])
