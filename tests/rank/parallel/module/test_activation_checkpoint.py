"""Test that activation checkpointing gives the same gradients, and computes again in backward."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.forward_wrapper import recompute
from nbkit.rank.rng.draw_plan import extent, extent_of
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.estimate.model_trace import LiveBytes
from nbkit.rank.train.out_of_memory import rescue
from nbkit.rank.train.out_of_memory.remedies import Setting
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.watching_mode import WatchingMode
from nbkit.trainer_options import RECOMPUTE
from verify.models.specimens import ZOO, gpt


def gradients(name: str, *, checkpoint: bool | str, thread: bool = False) -> tuple[list[Tensor | None], list[str]]:
    """Return the gradients of two micro-batches, and the blocks in the order of their computation. Both forwards run
    before the backward passes."""
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
        recompute(model, specimen.blocks, selective=checkpoint == "selective")
    keyed = KeyedDropout(model, seed=3)
    losses = []
    for rows in ((0, 1, 2), (3,)):
        with keyed.step(2, rows), extent("head", 1, 5):
            output = call(model, _rows(value, list(rows)))
            losses.append(specimen.loss(output, target[list(rows)]))
    assert extent_of("head") is None
    # Run the second backward first, so that dropout, rows and calls have changed before that of the first pass.
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


@pytest.mark.parametrize("how", [True, "selective"])
@pytest.mark.parametrize("name", ["gpt", "llama_tied", "gpt2_padded", "encoder", "pairs"])
def test_recomputed_gradients_are_the_same(name: str, how: bool | str) -> None:
    expected, once = gradients(name, checkpoint=False)
    assert all(grad is not None and bool(grad.any()) for grad in expected) or name != "gpt"
    for thread in (False, True):
        found, computed = gradients(name, checkpoint=how, thread=thread)
        assert computed == [*once, *[b for _ in range(2) for b in reversed(ZOO[name].blocks)]]
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


class Attention(nn.Module):
    """An attention without a kernel, and a feed-forward layer that changes outputs of products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = self.out(mixed.transpose(1, 2).flatten(2)) + x
        hidden = F.relu(self.up(x).mul_(0.5), inplace=True)
        y = self.down(hidden)
        y += x
        return y


def by_hand() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(4))).double()


def kept_bytes(model: nn.Module, value: Tensor, blocks: tuple[str, ...], how: bool | str) -> int:
    """Return the bytes that are alive between forward and backward, without parameters and inputs."""
    if how:
        recompute(model, blocks, selective=how == "selective")
    with LiveBytes([*model.parameters(), *model.buffers(), value], counted=False) as live:
        output = model(value)
    assert output.requires_grad
    return live.now


def test_recomputation_keeps_fewer_activations() -> None:
    blocks = tuple(f"blocks.{i}" for i in range(8))
    sizes = {how: kept_bytes(gpt(layers=8), ZOO["gpt"].batch(8)[0], blocks, how) for how in RECOMPUTE}
    assert sizes[True] < 0.4 * sizes[False]
    # A block has 16 tensors of the width: its input, two norms, queries, keys, values, the output of attention, the sum
    # after it, and four times the width before and after the activation. Without norms, sum and activation, it keeps 9,
    # and the output of the layer after attention. The rest of the model is the same.
    block = 8 * 16 * 32 * 4
    assert (sizes[False] - sizes["selective"]) / (8 * block) == pytest.approx(6, abs=0.5)


def test_an_attention_without_a_kernel_keeps_no_scores() -> None:
    x = torch.zeros(2, 64, 32, dtype=torch.float64, requires_grad=True)
    plain, selective = (kept_bytes(by_hand(), x, ("0", "1", "2", "3"), how) for how in (False, "selective"))
    scores = 2 * 4 * 64 * 64 * 8
    assert plain - selective > 4 * scores


class Products(WatchingMode):
    """A mode that counts products and attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.made[name] += name in ("aten::mm", "aten::addmm") or "attention" in name
        return func(*args, **(kwargs or {}))


def test_products_with_weights_and_attention_kernels_run_once() -> None:
    made = {}
    for how in RECOMPUTE:
        model, (ids, target) = gpt(), ZOO["gpt"].batch(2)
        if how:
            recompute(model, ZOO["gpt"].blocks, selective=how == "selective")
        with Products() as products:
            ZOO["gpt"].loss(model(ids), target).backward()
        made[how] = +products.made
    assert made["selective"] == made[False]
    # A block has six layers. No operation reads the output of the last one.
    assert (made[True] - made[False])["aten::addmm"] == 5 * len(ZOO["gpt"].blocks)


def test_gradients_are_the_same_after_in_place_changes_and_a_second_backward() -> None:
    x = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = {}
    for how in (False, "selective"):
        model = by_hand()
        if how:
            recompute(model, ("0", "1", "2", "3"), selective=True)
        loss = model(x).square().sum()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        found[how] = first, second
    for ours, plain in zip(found["selective"], found[False], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


class _SumInPlace(torch.autograd.Function):
    """A sum over the ranks, written as in Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Summing(nn.Module):
    """A block with its own collective, which writes into the output of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(_SumInPlace.apply(self.one(x)).tanh()).tanh()


def with_own_collectives(world: Any) -> list[list[Tensor]]:
    found = []
    for how in RECOMPUTE:
        torch.manual_seed(0)
        model = nn.Sequential(Summing(), Summing()).double()
        if how:
            recompute(model, ["0", "1"], selective=how == "selective")
        model(torch.full((2, 8), 1.0 + world.place.rank, dtype=torch.float64)).sum().backward()
        found.append([p.grad for p in model.parameters()])
    return found


@pytest.mark.long
def test_the_models_own_collective_may_write_into_an_output() -> None:
    for plain, *others in run_ranks(with_own_collectives, 2):
        for ours in others:
            assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


class Fickle(nn.Module):
    """A block that computes something different the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x @ self.one.weight if self.calls > 1 else self.one(x)
        return self.one(x.tanh()).tanh()


def test_a_block_that_computes_something_different_again_is_refused() -> None:
    model = nn.Sequential(Fickle())
    recompute(model, ["0"], selective=True)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(TrainingError, match="ran other operations") as refused:
        loss.backward()
    assert "operation 1 was aten.addmm.default, and is aten.mm.default" in str(refused.value)


def trainer(strategy: str, how: bool | str) -> Trainer:
    ids, target = ZOO["gpt"].batch(16)
    return Trainer(
        model=lambda: gpt(2, dropout=0.1).double(),
        loss=ZOO["gpt"].loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=list(zip(ids, target, strict=True)),
        batch_size=4,
        strategy=strategy,
        seed=5,
        log_dir=None,
        progress=False,
        compute=nbkit.Compute(recompute=how),
    )


def trained(world: Any, strategies: list[str]) -> dict[str, Any]:
    """Return (losses, sum of all weights, collectives of a step) for each strategy and each way to recompute."""
    found: dict[str, Any] = {}
    collectives.set_mode("count")
    for strategy in strategies:
        for how in RECOMPUTE:
            job = trainer(strategy, how)
            job.fit(2)
            began = collectives.ring.end
            job.fit(1)
            calls = collectives.ring.between(began, collectives.ring.end)[0]
            sums = [float(p.double().sum()) for p in job.full_state_dict().values()]
            counts = Counter(f"{each.axis} {each.op}" for each in calls)
            found[f"{strategy}, {how}"] = [record["loss"] for record in job.history], sums, counts
    return found


SEND_AGAIN = ("tp", "cp")


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("num_ranks", "strategies"),
    [
        (2, ["tp"]),
        pytest.param(2, ["ddp", "zero3", "cp=2", "pp microbatches=2"], marks=pytest.mark.long),
        pytest.param(4, ["zero1", "zero2", "dp=2 tp=2 zero=3", "pp=2 tp=2 microbatches=2"], marks=pytest.mark.long),
    ],
)
def test_selective_recomputation_changes_no_bit_and_sends_nothing(num_ranks: int, strategies: list[str]) -> None:
    for found in run_ranks(trained, num_ranks, strategies, timeout=240):
        for strategy in strategies:
            plain, ours, all_again = (found[f"{strategy}, {how}"] for how in RECOMPUTE)
            assert ours == plain, strategy
            sends_again = any(axis in strategy for axis in SEND_AGAIN)
            assert (all_again[2] != plain[2]) == sends_again, (strategy, all_again[2], plain[2])


def switched(world: Any) -> tuple[list[float], list[float], list[int]]:
    """Return (losses of a training that changes recomputation, losses without recomputation, bytes kept)."""
    changing, plain = trainer("ddp", False), trainer("ddp", False)
    kept = []
    for how in (False, "selective", True, "selective"):
        job = changing.job
        rescue.apply(job, Setting(job.strategy, 4 // world.place.world_size, how), 4)
        changing.fit(1)
        kept.append(kept_bytes(job.sharded_model.module, ZOO["gpt"].batch(8)[0], (), False))
    plain.fit(4)
    return [record["loss"] for record in changing.history], [record["loss"] for record in plain.history], kept


@pytest.mark.usefixtures("known_to_be_right")
def test_recomputation_can_be_changed_during_a_training() -> None:
    for changing, plain, kept in run_ranks(switched, 2, timeout=120):
        assert changing == plain
        assert kept[0] > kept[1] > kept[2] and kept[3] == kept[1]


def test_recompute_keeps_parameter_names_and_outputs_in_evaluation() -> None:
    model, (ids, _) = gpt(), ZOO["gpt"].batch(2)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        expected = model(ids)
        recompute(model, ZOO["gpt"].blocks)
        assert torch.equal(model(ids), expected)

    assert [name for name, _ in model.named_parameters()] == names


def test_blocks_with_sharded_parameters_have_the_same_gradients() -> None:
    """Gather a block's parameters in hooks before its forward and its backward, like a sharded data axis."""
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
