"""Test that ZeRO 0-3 and hsdp train as one process, hold what the paper says, and send only what they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nbkit.mesh import Mesh
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel.data_parallel import ddp
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.tensor_layout import Layout

STEPS = 3


class Odd(nn.Module):
    """A model with uneven shapes, a scalar, a frozen layer, a tied weight, and blocks that only few or no rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(4))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight
        self.blocks[3][0].weight = self.blocks[1][0].weight
        self.blocks[0][0].requires_grad_(False)
        self.blocks[2].unused = nn.Parameter(torch.ones(5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for i, block in enumerate(self.blocks):
            # Rows that begin with 0 skip a block, so a rank may have no row that uses it.
            use = (ids[:, 0] != 0) if i == 1 else torch.ones(len(ids), dtype=torch.bool)
            if use.any():
                x = x + block(x) * use[:, None, None]
        return self.head(x)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)


class Text(GPT):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__(GPTConfig(vocab=17, block=8, layers=3, heads=2, width=8))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        if not self.checkpointed:
            return super().forward(ids)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)


MODELS: dict[str, Callable[[], Any]] = {
    "odd": Odd,
    "gpt": Text,
    "checkpointed": lambda: Text(checkpointed=True),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def built(model: str) -> Any:
    torch.manual_seed(0)
    return MODELS[model]().double()


def batch(model: str, step: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    vocab = 7 if model == "odd" else 17
    data = torch.randint(0, vocab, (rows, 9), generator=draw)
    data[: rows // 2, 0] = 0
    return data[:, :-1], data[:, 1:]


def loss_of(module: nn.Module, ids: Tensor, target: Tensor, total: int) -> Tensor:
    return F.cross_entropy(module(ids).flatten(0, 1), target.flatten(), reduction="sum") / total


def one_process(model: str, optimizer: str, rows: int) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    module = built(model)
    made = OPTIMIZERS[optimizer](module.parameters())
    first: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        made.zero_grad()
        loss_of(module, *batch(model, step, rows), rows * 8).backward()
        if step == 0:
            first = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        made.step()
    return first, {n: p.detach() for n, p in module.named_parameters()}


def prepared(axes: Axes, module: Any, zero: int, **kwargs: Any) -> tuple[Any, DataAxis]:
    skeleton = skeleton_of(module)
    layouts = {name: Layout.whole(p.shape) for name, p in module.named_parameters()}
    axis = data_axis(skeleton, layouts, axes, zero=zero, units=skeleton.units(), **kwargs)
    source = dict(module.named_parameters())
    for name, (tensor, layout) in axis.weights.items():
        for here, there in layout.pieces:
            tensor[here.slices] = source[name].detach()[there.slices]
    axis.refresh()
    return skeleton, axis


def rows_of(rank: int, size: int, rows: int) -> slice:
    """Return the rows of a rank. Ranks have unequal numbers of rows, and the last rank has none."""
    ends = [min(rows, -(-rows // (size - 1)) * r) for r in range(size)] + [rows]
    return slice(ends[rank], ends[rank + 1]) if rank < size - 1 else slice(rows, rows)


def parts(value: Tensor, layout: Layout) -> Tensor:
    out = value.new_zeros(layout.local)
    for here, there in layout.pieces:
        out[here.slices] = value[there.slices]
    return out


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30)) if wanted.numel() else 0.0


def train(
    world: Any,
    model: str,
    optimizer: str,
    zero: int,
    shard: int | None,
    micro: int,
    tp: int = 1,
    nodes: tuple[int, ...] = (),
    **kwargs: Any,
) -> list[str]:
    # Ranks along tp hold the same here, so their sums must stay separate.
    mesh, summed = Mesh(dp=world.place.world_size // tp, tp=tp), "replicate" if zero else "dp"
    axes = Axes.of(mesh, world.place.rank, shard=shard, summed=summed, node_of=nodes)
    assert (axes.levels(summed) is not None) == bool(nodes)
    rank, size, rows = axes.index("dp"), axes.size("dp"), 7
    grads, weights = one_process(model, optimizer, rows)
    module, axis = prepared(axes, built(model), zero, **kwargs)
    made = OPTIMIZERS[optimizer](axis.held.values())
    wrong = []
    mine = rows_of(rank, size, rows)
    passes = max(-(-(part.stop - part.start) // micro) for part in (rows_of(r, size, rows) for r in range(size)))
    for step in range(STEPS):
        made.zero_grad()
        axis.reset(passes=passes)
        ids, target = (part[mine] for part in batch(model, step, rows))
        cuts = list(zip(ids.split(micro), target.split(micro), strict=True)) if len(ids) else []
        for i, (some, wanted) in enumerate(cuts):
            loss = loss_of(module, some, wanted, rows * 8)
            if i == len(cuts) - 1:
                axis.start()
            loss.backward()
            if i < len(cuts) - 1:
                axis.hold()
        if not cuts:
            axis.start()
        canary = axis.finish()
        if float(canary) != ddp.ALIVE:
            wrong.append(f"canary {canary}")
        if step == 0:
            whole = torch.cat([g.flatten() for g in grads.values() if g is not None]).norm()
            for name, p in axis.held.items():
                if (p.grad is None) != (grads[name] is None):
                    wrong.append(f"{name}: gradient {p.grad}")
                elif (
                    p.grad is not None
                    and (gap := (p.grad - parts(grads[name], axis.layouts[name])).norm()) > 1e-13 * whole
                ):
                    wrong.append(f"{name}: gradient off by {float(gap):.1e}")
        made.step()
        axis.after_step()
    with torch.no_grad():
        everything = torch.cat([v.flatten() for v in weights.values()])
        for name, (tensor, layout) in axis.weights.items():
            if (gap := float((tensor - parts(weights[name], layout)).norm() / everything.norm())) > 1e-13:
                wrong.append(f"{name}: weight off by {gap:.1e}")
        # A forward without gradients, with a rank that has no rows.
        ids, target = (part[mine] for part in batch(model, 99, rows))
        if len(ids):
            whole = built(model)
            whole.load_state_dict({**whole.state_dict(), **weights})
            if far(module.eval()(ids), whole(ids)) > 1e-12:
                wrong.append("evaluation differs")
        else:
            axis.absent()
    return wrong


def suite(world: Any, cases: list[tuple[Any, ...]]) -> dict[str, list[str]]:
    found = {}
    for *case, kwargs in cases:
        if wrong := train(world, *case, **kwargs):
            found[str((*case, kwargs))] = wrong
    return found


CASES = {
    2: [
        *(("odd", "foreach", zero, None, 9, {}) for zero in range(4)),
        ("odd", "fused", 1, None, 2, {}),
        ("gpt", "sgd", 3, None, 3, {}),
        ("checkpointed", "foreach", 3, None, 3, {}),
    ],
    4: [
        *(("odd", "sgd", zero, 2, 2, {}) for zero in (0, 2)),
        ("gpt", "fused", 3, 2, 9, {}),
        ("odd", "fused", 2, None, 2, {"tp": 2}),
        ("odd", "foreach", 3, 2, 1, {"keep": True}),
        ("checkpointed", "sgd", 3, None, 2, {"ahead": 2}),
        ("odd", "foreach", 0, None, 2, {"nodes": (0, 0, 1, 1)}),
    ],
    8: [("odd", "foreach", 3, 2, 1, {"nodes": (0, 0, 0, 0, 1, 1, 1, 1)})],
}
ALSO = {
    4: [*(("odd", "foreach", zero, None, 2, {}) for zero in (1, 3)), ("odd", "fused", 3, 1, 9, {})],
    8: [
        ("gpt", "sgd", 3, 2, 1, {"nodes": (0, 0, 0, 0, 1, 1, 1, 1)}),
        ("odd", "foreach", 1, 2, 1, {"nodes": (0, 0, 1, 1, 1, 1, 0, 0)}),
        ("odd", "sgd", 0, None, 1, {"nodes": (0, 0, 0, 0, 1, 1, 2, 2)}),
    ],
}


@pytest.mark.parametrize(
    ("size", "cases"), [*CASES.items(), *(pytest.param(*more, marks=pytest.mark.long) for more in ALSO.items())]
)
def test_gradients_and_three_steps_equal_one_process(size: int, cases: list[Any]) -> None:
    for found in run_ranks(suite, size, cases, timeout=150):
        assert found == {}
