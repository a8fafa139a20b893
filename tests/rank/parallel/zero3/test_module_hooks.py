"""Test zero 3 with checkpoints, LoRA, autocast, pipelines, in-place writes and interrupted steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nbkit.errors import TrainingError
from nbkit.mesh import Mesh
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.zero3.zero3 import backward_tour, nested
from nbkit.tensor_layout import Layout

D = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.view = nn.Linear(D, D), nn.Linear(D, D), False

    def forward(self, x: Tensor, *, gate: Tensor | None = None) -> dict[str, Any]:
        y = self.two(torch.tanh(self.one(x)))
        if self.view:
            return {"y": torch.sin(y).view(-1, 2, D // 2)}
        return {"y": y if gate is None else y * gate, "rest": (x.sum(), None)}


class Net(nn.Module):
    """A model of blocks after an inlet. how: the way in which it uses the blocks."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.inlet = nn.Linear(D, D)
        self.gate = nn.Parameter(torch.ones(D))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if how == "lora":
            self.requires_grad_(False)
            for block in self.blocks:
                block.one.bias.requires_grad_(True)
                block.two.weight.requires_grad_(True)
        if how == "nested":
            self.blocks[1].inner = Block()
            self.blocks[1].other = Block()
            self.blocks[1].forward = self.around  # type: ignore[method-assign]

    def around(self, x: Tensor, gate: Tensor | None = None) -> dict[str, Any]:
        block = self.blocks[1]
        x = block.one(block.inner(x)["y"])
        return {"y": block.two(block.other(x)["y"])}

    def segment(self, x: Tensor, first: int, last: int) -> Tensor:
        for block in self.blocks[first:last]:
            x = x + block(x, gate=self.gate)["y"]
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        if self.how == "segments":
            return checkpoint(self.segment, x, 0, 4, use_reentrant=False)
        if self.how == "reentrant":
            return checkpoint(self.segment, x, 0, 4, use_reentrant=True)
        if self.how == "shared":
            for i in (0, 0, 1, 0, 2, 3):
                x = x + self.blocks[i](x)["y"]
            return x
        if self.how == "in place":
            for block in self.blocks:
                block.view = True
                x = block(x)["y"]
                x += 1
                x = x.flatten(1)
            return x
        if self.how == "backwards":
            for block in reversed(self.blocks):
                x = x + block(x)["y"]
            return x
        return self.segment(x, 0, 4)


def prepared(world: Any, net: nn.Module, units: Any = None, zero: int = 3, **kwargs: Any) -> tuple[Any, DataAxis]:
    module = skeleton_of(net)
    layouts = {name: Layout.whole(p.shape) for name, p in net.named_parameters()}
    axes = Axes.of(Mesh(dp=world.place.world_size), world.place.rank)
    chosen = list(module.blocks) if units is None else units(module)
    axis = data_axis(module, layouts, axes, zero=zero, units=chosen, **kwargs)
    source = dict(net.named_parameters())
    for name, (tensor, layout) in axis.weights.items():
        for here, there in layout.pieces:
            tensor[here.slices] = source[name].detach()[there.slices]
    return module, axis


def data(rank: int, n: int = 1) -> list[Tensor]:
    return [torch.randn(3, D, generator=torch.Generator().manual_seed(10 * rank + i)).double() for i in range(n)]


def built(how: str) -> Net:
    torch.manual_seed(0)
    return Net(how).double()


def gap(axis: DataAxis, net: nn.Module) -> float:
    """Return the largest difference of the gradients from those of `net`."""
    off = 0.0
    for name, p in net.named_parameters():
        found, layout = axis.held[name].grad, axis.layouts[name]
        if p.grad is None or found is None:
            assert p.grad is None and found is None, name
            continue
        for here, there in layout.pieces:
            off = max(off, float((found[here.slices] - p.grad[there.slices]).abs().max()))
    return off


def step(axis: DataAxis, module: Any, rank: int) -> None:
    axis.reset()
    axis.start()
    module(data(rank)[0]).square().sum().backward()
    axis.finish()


def reference(how: str, ranks: int, passes: int = 1) -> Net:
    net = built(how)
    for rank in range(ranks):
        for x in data(rank, passes):
            net(x).square().sum().backward()
    return net


def inner_units(module: Any) -> list[nn.Module]:
    return [*module.blocks, module.blocks[1].inner, module.blocks[1].other]


def kinds(world: Any) -> dict[str, float]:
    rank, ranks = world.place.rank, world.place.world_size
    found = {}
    for how, more in {
        "": {},
        "lora": {},
        "shared": {},
        "in place": {},
        "segments": {"ahead": 3},
        "nested": {"units": inner_units},
        "one unit in another": {"units": lambda module: [module.blocks, *module.blocks]},
        "no units": {"units": lambda module: []},
    }.items():
        name = how if how in ("lora", "shared", "in place", "segments", "nested") else ""
        module, axis = prepared(world, built(name), **more)
        for _ in range(2):
            step(axis, module, rank)
        found[how] = gap(axis, reference(name, ranks))
        for key, p in module.named_parameters():
            assert p is axis.held[key], how
    return found


def test_gradients_are_right_however_the_blocks_are_used() -> None:
    for found in run_ranks(kinds, 2):
        assert {how: off for how, off in found.items() if off > 1e-12} == {}


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def wrapped(world: Any) -> list[float]:
    """Return the gaps of a model in two nested wrappers, like adapters, called at each of the three levels."""
    rank, ranks = world.place.rank, world.place.world_size
    net = reference("", ranks)
    module, axis = prepared(world, Wrapper(Wrapper(net)), units=lambda module: list(module.inner.inner.blocks))
    found = []
    for entry in (module, module.inner, module.inner.inner):
        heard: list[str] = []
        delegating_group.listeners.append(lambda op, group, nbytes, heard=heard: heard.append(op))
        step(axis, entry, rank)
        delegating_group.listeners.clear()
        assert heard.count("all_gather") == 5 + 4
        found.append(gap(axis, Wrapper(Wrapper(net))))
        for p in axis.held.values():
            p.grad = None
    # Every rank calls a single block, as a user who inspects a model may.
    with torch.no_grad():
        alone = module.inner.inner.blocks[1](data(0)[0])["y"]
        assert all(p is axis.held[name] for name, p in module.named_parameters())
        found.append(float((alone - net.blocks[1](data(0)[0])["y"]).abs().max()))
    return found


def test_a_wrapped_model_may_be_called_at_any_depth() -> None:
    for found in run_ranks(wrapped, 2):
        assert max(found) < 1e-12


def pipelined(world: Any) -> list[Any]:
    """Run all forwards before all backwards, like a pipeline."""
    rank, ranks = world.place.rank, world.place.world_size
    found: list[Any] = []
    for keep in (True, False):
        module, axis = prepared(world, built(""), keep=keep)
        heard: list[str] = []
        delegating_group.listeners.append(lambda op, group, nbytes, heard=heard: heard.append(op))
        axis.reset()
        losses = [module(x).square().sum() for x in data(rank, 3)]
        if not keep:
            with pytest.raises(TrainingError, match="strategy='zero2'"):
                losses[0].backward()
        else:
            for i, loss in enumerate(losses):
                if i == len(losses) - 1:
                    axis.start()
                loss.backward()
            axis.finish()
            found += [gap(axis, reference("", ranks, 3)), heard.count("all_gather"), heard.count("reduce_scatter")]
        delegating_group.listeners.clear()
        axis.begin_again()
        # After an interrupted step, the next step is right.
        step(axis, module, rank)
        found.append(gap(axis, reference("", ranks)))
    return found


def test_a_pipeline_order_gathers_once_and_an_interrupted_step_does_no_harm() -> None:
    for off, gathered, reduced, after, again in run_ranks(pipelined, 2):
        assert max(off, after, again) < 1e-12
        assert (gathered, reduced) == (5, 5)


def lively(world: Any) -> dict[int, Any]:
    """Freeze and unfreeze weights between steps, like a user, and evaluate in the middle of a step."""
    rank, ranks = world.place.rank, world.place.world_size
    found = {}
    net = built("")
    net.blocks[1:3].requires_grad_(False)
    for other in range(ranks):
        net(data(other)[0]).square().sum().backward()
    for zero in range(4):
        # One weight is frozen from the start, the other later.
        whole = built("")
        whole.blocks[1].requires_grad_(False)
        module, axis = prepared(world, whole, zero=zero)
        module.blocks[2].requires_grad_(False)
        seen: list[bool] = []
        look = module.blocks[2].one.register_forward_hook(
            lambda part, *_, seen=seen: seen.append(part.weight.requires_grad)
        )
        step(axis, module, rank)
        look.remove()
        assert seen == [False] and not axis.held["blocks.2.one.weight"].requires_grad
        frozen = gap(axis, net)
        module.blocks[1:3].requires_grad_(True)
        for p in axis.held.values():
            p.grad = None
        axis.reset()
        axis.start()
        output = module(data(rank)[0])
        with torch.no_grad():
            same = torch.equal(module(data(rank)[0]), output)
        output.square().sum().backward()
        axis.finish()
        found[zero] = (frozen, gap(axis, reference("", ranks)), same)
    return found


def test_freezing_unfreezing_and_evaluating_inside_a_step_are_right() -> None:
    for found in run_ranks(lively, 2):
        for zero, (frozen, thawed, same) in found.items():
            assert max(frozen, thawed) < 1e-12 and same, zero


def autocast(world: Any) -> float:
    rank, ranks = world.place.rank, world.place.world_size
    torch.manual_seed(0)
    net = Net()
    module, axis = prepared(world, net)
    for other in range(ranks):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(data(other)[0].float()).float().square().sum()
        loss.backward()
    for _ in range(2):
        axis.reset()
        axis.start()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(data(rank)[0].float()).float().square().sum()
        loss.backward()
        axis.finish()
        with torch.no_grad():
            assert all(p.dtype == torch.float32 for p in axis.held.values())
    return gap(axis, net)


def test_gradients_under_bf16_autocast_are_right() -> None:
    assert max(run_ranks(autocast, 2)) < 1e-5


def refused(world: Any) -> list[str]:
    said = []
    for how in ("segments", "backwards", "reentrant"):
        module, axis = prepared(world, built(how))
        with pytest.raises(TrainingError) as raised:
            step(axis, module, world.place.rank)
        said.append(str(raised.value))
    return said


def test_uses_that_cannot_be_right_are_refused_by_name() -> None:
    for segments, backwards, reentrant in run_ranks(refused, 2):
        assert "blocks.0" in segments and "blocks.3" in segments and "example=batch" in segments
        assert "later than its place in the order" in backwards and "strategy='zero2'" in backwards
        assert "use_reentrant=False" in reentrant


def test_a_backward_tour_gathers_ahead_and_releases_in_order() -> None:
    def spoken(parents: list[int], ahead: int) -> str:
        return " ".join(("+" if gathers else "-") + str(number) for gathers, number in backward_tour(parents, ahead))

    assert spoken([-1, 0, 0, 0], 1) == "+3 +2 -3 +1 -2 -1 -0"
    assert spoken([-1, 0, 0, 0], 0) == "+3 -3 +2 -2 +1 -1 -0"
    assert spoken([-1, 0, 0, 0], 2) == "+3 +2 +1 -3 -2 -1 -0"
    # 2 and 3 are inside 1, so 1 is entered before them and left after them.
    assert spoken([-1, 0, 1, 1], 1) == "+1 +3 +2 -3 -2 -1 -0"
    assert spoken([-1], 1) == "-0"


def test_units_inside_units_are_found_and_ordered() -> None:
    net = built("nested")
    blocks, parents = nested(net, [net.blocks[1].inner, *net.blocks, net.blocks[1].other])

    assert parents == [-1, 0, 0, 2, 2, 0, 0]
    assert blocks == [net, *net.blocks[:2], net.blocks[1].inner, net.blocks[1].other, *net.blocks[2:]]
