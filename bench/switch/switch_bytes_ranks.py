"""One rank of `switch_bytes`: holds a transformer's state under one strategy after the other, and exchanges it.

python -m bench.switch.switch_bytes_ranks PORT RANK RANKS WIDTH LAYERS OUT
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.rigs.loopback import measured
from nbkit.mesh import Mesh
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.tensor_layout import Layout

CPU = torch.device("cpu")
KINDS = ("weight", "exp_avg", "exp_avg_sq")
Holding = dict[str, Layout]


def strategies(ranks: int) -> dict[str, tuple[Mesh, int]]:
    """name -> (mesh, ZeRO stage): the eight of every size that has them."""
    half = ranks // 2
    return {
        "ddp": (Mesh(dp=ranks), 0),
        "zero1": (Mesh(dp=ranks), 1),
        "zero3": (Mesh(dp=ranks), 3),
        "tp": (Mesh(tp=ranks), 0),
        "pp": (Mesh(pp=ranks), 0),
        f"dp={half} tp=2": (Mesh(dp=half, tp=2), 0),
        f"dp={half} pp=2": (Mesh(dp=half, pp=2), 0),
        f"tp=2 pp={half}": (Mesh(tp=2, pp=half), 0),
    }


def tensors(width: int, layers: int) -> list[tuple[str, tuple[int, ...], int | None, int]]:
    """(name, shape, the dim that tp cuts, layer) of a decoder; embeddings count as its first and last layer."""
    found: list[tuple[str, tuple[int, ...], int | None, int]] = [("tokens", (8 * width, width), 0, 0)]
    for layer in range(layers):
        found += [
            (f"{layer}.qkv", (3 * width, width), 0, layer),
            (f"{layer}.qkv.bias", (3 * width,), 0, layer),
            (f"{layer}.out", (width, width), 1, layer),
            (f"{layer}.up", (4 * width, width), 0, layer),
            (f"{layer}.down", (width, 4 * width), 1, layer),
            (f"{layer}.norm", (width,), None, layer),
        ]
    return [*found, ("head", (8 * width, width), 0, layers - 1)]


@cache
def layout(shape: tuple[int, ...], dim: int | None, tp: tuple[int, int], shard: tuple[int, int]) -> Layout:
    """Cut by tp along `dim`, then by ZeRO along dim 0; (index, degree) of both."""
    cut = Layout.whole(shape) if dim is None else Layout.whole(shape).part(dim, tp[1], tp[0])
    return cut.part(0, shard[1], shard[0])


def shards_held(mesh: Mesh, zero: int, width: int, layers: int) -> list[Holding]:
    """What each rank holds: weights and AdamW's two moments."""
    found: list[Holding] = []
    for rank in range(mesh.size):
        at, holding = mesh.index(rank), {}
        for name, shape, dim, layer in tensors(width, layers):
            if layer * mesh.pp // layers == at["pp"]:
                for kind in KINDS:
                    sharded = zero == 3 or (zero and kind != "weight")
                    shard = (at["dp"], mesh.dp) if sharded else (0, 1)
                    holding[f"{kind}/{name}"] = layout(shape, dim, (at["tp"], mesh.tp), shard)
        found.append(holding)
    return found


def raw(plan: ExchangePlan, rank: int) -> Callable[[], object]:
    """One all-to-all of as many bytes between every two ranks, from and into one flat buffer."""
    ranks = range(len(plan.new))
    out, into = [plan.pairs.get((rank, r), 0) for r in ranks], [plan.pairs.get((r, rank), 0) for r in ranks]
    outgoing, incoming = torch.ones(sum(out), dtype=torch.uint8), torch.empty(sum(into), dtype=torch.uint8)
    return lambda: dist.all_to_all_single(incoming, outgoing, into, out)


def filled(holding: Holding, numbers: dict[str, int]) -> dict[str, tuple[Tensor, Layout]]:
    """A state whose values follow from key and place in the global tensor: ranks agree on what they share."""
    found = {}
    for key, held in holding.items():
        tensor = torch.empty(held.local)
        for here, there in held.pieces:
            value = torch.full((1,) * len(there.shape), float(numbers[key]))
            for dim, (start, length) in enumerate(zip(there.start, there.shape, strict=True)):
                along = torch.arange(start, start + length, dtype=torch.float32) * (dim * 977 + 1)
                value = value + along.view([length if d == dim else 1 for d in range(len(there.shape))])
            tensor[here.slices] = value
        found[key] = (tensor, held)
    return found


def main(port: int, rank: int, ranks: int, width: int, layers: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    every = {name: shards_held(mesh, zero, width, layers) for name, (mesh, zero) in strategies(ranks).items()}
    sizes = dict.fromkeys((key for holding in every["ddp"] for key in holding), 4)
    numbers = {key: number for number, key in enumerate(sorted(sizes))}
    pairs = [(old, new) for old in every for new in every if old != new]
    random.Random(0).shuffle(pairs)
    rows = []
    for old, new in pairs:
        source = filled(every[old][rank], numbers)
        target = {key: (torch.full(held.local, float("nan")), held) for key, held in every[new][rank].items()}
        began = time.perf_counter()
        plan = ExchangePlan.of(every[old], every[new], sizes)
        exchange = Exchange(plan, rank)
        prepared = time.perf_counter() - began
        _, idle = measured(lambda: None)
        seconds, wire = measured(partial(exchange.run, source, target, device=CPU))
        plain, _ = measured(raw(plan, rank))
        before = digest(source, every[old], rank=rank, device=CPU)
        after = digest(target, every[new], rank=rank, device=CPU)
        rows.append([old, new, plan.total_bytes, wire - idle, seconds, plain, prepared, before == after])
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    numbers, path = [int(word) for word in sys.argv[1:6]], Path(sys.argv[6])
    main(*numbers, path)
