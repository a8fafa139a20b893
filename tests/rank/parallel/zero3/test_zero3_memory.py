"""Test that ZeRO holds and sends what the paper says, at rest and during a step."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.mesh import Mesh
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.zero3.unit import NotGathered
from nbkit.tensor_layout import Layout

WIDTH, LAYERS = 256, 6


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def num_bytes() -> int:
    """Return the bytes of all storages of tensors of this process."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measured(world: Any, zero: int) -> dict[str, Any]:
    size = world.place.world_size
    before = num_bytes()
    with torch.device("meta"):
        model = Stack()
    num_params = sum(p.numel() for p in model.parameters())
    module = skeleton_of(Stack())
    layouts = {name: Layout.whole(p.shape) for name, p in model.named_parameters()}
    axes = Axes.of(Mesh(dp=size), world.place.rank)
    axis = data_axis(module, layouts, axes, zero=zero, units=list(module.blocks))
    for tensor, _ in axis.weights.values():
        tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    axis.refresh()
    optimizer = torch.optim.Adam(axis.held.values(), lr=1e-3)
    sent: list[tuple[str, int]] = []
    opened: list[int] = []
    by_then: list[int] = []
    x = torch.ones(1, WIDTH)
    for step in range(3):
        optimizer.zero_grad()
        axis.reset()
        if step == 2:
            delegating_group.listeners.append(lambda op, group, nbytes: sent.append((op, nbytes)))
            for block in module.blocks:

                def look(*_: Any) -> None:
                    by_then.append(len(sent))
                    weights = [b[0].weight for b in module.blocks]
                    opened.append(sum(w.shape[0] == WIDTH and not isinstance(w, NotGathered) for w in weights))

                block.register_forward_hook(look)
                block.register_full_backward_hook(look)
        output = module(x)
        during_forward = len(sent)
        axis.start()
        output.sum().backward()
        during_backward = len(sent)
        axis.finish()
        optimizer.step()
        axis.after_step()
        axis.settle()
    delegating_group.listeners.clear()
    del output
    time.sleep(0.5)  # gloo's threads free sent tensors a moment after their arrival
    held = num_bytes() - before
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return {
        "per parameter": held / num_params,
        "parameters": num_params,
        "sent": sent,
        "when": (during_forward, during_backward, len(sent)),
        "opened": opened,
        "by then": by_then,
        "shards": shapes == {name: tuple(p.shape) for name, p in axis.held.items()},
    }


def every_zero(world: Any) -> list[dict[str, Any]]:
    return [measured(world, zero) for zero in range(4)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def by_zero(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, run_ranks(every_zero, request.param)[0]


def test_bytes_at_rest_and_sent_equal_the_formulas(by_zero: tuple[int, list[dict[str, Any]]]) -> None:
    n, measurements = by_zero
    for zero, found in enumerate(measurements):
        formula = [16, 8 + 8 / n, 4 + 12 / n, 16 / n][zero]
        assert found["per parameter"] == pytest.approx(formula, rel=0.005), zero
        # all_reduce and reduce_scatter report their whole input, all_gather this rank's part.
        volume = 4 * found["parameters"]
        told = {op: sum(b for o, b in found["sent"] if o == op) for op in {o for o, _ in found["sent"]}}
        if zero == 0:
            wanted = {"all_reduce": volume}
        else:
            root = volume / (LAYERS + 1)
            gathered = (2 * volume - root) / n if zero == 3 else volume / n
            wanted = {"reduce_scatter": volume, "all_gather": gathered}
        assert told == pytest.approx(wanted, rel=0.005), zero
        assert found["shards"] == (zero in (0, 3))


def test_messages_overlap_backward_and_zero3_holds_at_most_two_blocks(by_zero: Any) -> None:
    _, measurements = by_zero
    for found in measurements[1:3]:
        assert found["when"][1] >= 1
    forward, backward, all_of_it = measurements[3]["when"]
    # When the forward of a block is done, the next block is being sent.
    assert measurements[3]["by then"][:LAYERS] == [min(i + 3, LAYERS + 1) for i in range(LAYERS)]
    assert forward == LAYERS + 1
    # By then all gathers are issued, and all reductions except that of the root, which waits for `finish`.
    assert backward == all_of_it - 1
    # At most two blocks are whole, in forward and in backward: the running block, and one more.
    assert len(measurements[3]["opened"]) == 2 * LAYERS and max(measurements[3]["opened"]) <= 2
