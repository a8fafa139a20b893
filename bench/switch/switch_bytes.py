"""Compare the bytes that a switch sends, between all ordered pairs of eight strategies, with a lower bound.

The lower bound does not come from the plan: it counts one flag per element. The bytes are those of the network
interface in a private namespace, less the traffic of two empty barriers.

python -m bench.switch.switch_bytes PORT RANK RANKS WIDTH LAYERS OUT      run one rank of it
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.rigs.loopback import measured
from bench.settings import Settings
from bench.table import Row, skipped
from nbkit.mesh import Mesh
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.tensor_layout import Layout

CPU = torch.device("cpu")
KINDS = ("weight", "exp_avg", "exp_avg_sq")
Holding = dict[str, Layout]


def strategies(ranks: int) -> dict[str, tuple[Mesh, int]]:
    """Return the eight strategies of an even number of ranks: name -> (mesh, ZeRO stage)."""
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
    """Return (name, shape, the dim that tp cuts, layer) of a decoder's tensors.

    The embedding belongs to the first layer, the head to the last one.
    """
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
    """Return the layout of a tensor that tp cuts along `dim`, then ZeRO along dim 0. tp, shard: (index, degree)."""
    cut = Layout.whole(shape) if dim is None else Layout.whole(shape).part(dim, tp[1], tp[0])
    return cut.part(0, shard[1], shard[0])


def shards_held(mesh: Mesh, zero: int, width: int, layers: int) -> list[Holding]:
    """Return what each rank holds: weights and AdamW's two moments."""
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
    """Return a function that sends the plan's bytes between every two ranks: one all-to-all of flat buffers."""
    ranks = range(len(plan.new))
    out, into = [plan.pairs.get((rank, r), 0) for r in ranks], [plan.pairs.get((r, rank), 0) for r in ranks]
    outgoing, incoming = torch.ones(sum(out), dtype=torch.uint8), torch.empty(sum(into), dtype=torch.uint8)
    return lambda: dist.all_to_all_single(incoming, outgoing, into, out)


def filled(holding: Holding, numbers: dict[str, int]) -> dict[str, tuple[Tensor, Layout]]:
    """Return a state whose values follow from key and place in the global tensor, so that all ranks agree on them."""
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


RANKS = (4, 8)
WIDTH, LAYERS, QUICK_WIDTH = 320, 8, 64
BYTES_FACTOR, BYTES_PER_RANK = 1.02, 64 << 10
PAUSE_FACTOR, PAUSE_SECONDS = 1.5, 0.150


def run(settings: Settings) -> list[Row]:
    """Return rows about bytes, pairs that move no bytes, time and identity, for each number of ranks."""
    rows = []
    for ranks in settings.sizes(RANKS):
        if not settings.isolated:
            return [skipped("bytes of a switch", "lower bound", "no private network namespace here")]
        width = QUICK_WIDTH if settings.quick else WIDTH
        rows += _rows(ranks, _measured(settings, ranks, width), _bounds(ranks, width))
    return rows


Measured = list[tuple[str, str, int, int, float, float, float, bool]]


def _measured(settings: Settings, ranks: int, width: int) -> Measured:
    out = settings.folder / f"switch-{ranks}.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.switch.switch_bytes", str(port)]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), str(width), str(LAYERS), str(out)]) for rank in range(ranks)
    ]
    try:
        if failed := [rank for rank, process in enumerate(started) if process.wait()]:
            raise RuntimeError(f"ranks {failed} failed")
    finally:
        for process in started:
            process.kill()
    return [tuple(row) for row in json.loads(out.read_text())]  # type: ignore[misc]


def _bounds(ranks: int, width: int) -> dict[tuple[str, str], int]:
    """Return (old, new) -> bytes of the elements that ranks hold after the switch, but not before."""

    @cache
    def lacking(before: object, after: object) -> int:
        flags = np.zeros(after.shape, dtype=bool)  # type: ignore[attr-defined]
        for _, box in after.pieces:  # type: ignore[attr-defined]
            flags[box.slices] = True
        for _, box in before.pieces if before is not None else ():  # type: ignore[attr-defined]
            flags[box.slices] = False
        return int(np.count_nonzero(flags)) * 4

    every = {name: shards_held(mesh, zero, width, LAYERS) for name, (mesh, zero) in strategies(ranks).items()}
    return {
        (old, new): sum(
            lacking(before.get(key), layout)
            for before, after in zip(every[old], every[new], strict=True)
            for key, layout in after.items()
        )
        for old in every
        for new in every
        if old != new
    }


def _rows(ranks: int, measured: Measured, bounds: dict[tuple[str, str], int]) -> list[Row]:
    moving = [row for row in measured if bounds[row[0], row[1]]]
    still = [row for row in measured if not bounds[row[0], row[1]]]
    of = f"{len(measured)} pairs of strategies, {ranks} ranks"
    fits = [wire <= BYTES_FACTOR * bounds[a, b] + BYTES_PER_RANK * ranks for a, b, _, wire, *_ in measured]
    factors = [wire / bounds[a, b] for a, b, _, wire, *_ in moving]
    planned = all(row[2] == bounds[row[0], row[1]] for row in measured)
    quick = [took <= PAUSE_FACTOR * plain + PAUSE_SECONDS for *_, took, plain, _, _ in measured]
    slowdowns = sorted(took / plain for *_, took, plain, _, _ in moving)
    same = [row[-1] for row in measured]
    return [
        Row(
            f"wire bytes of a switch, {of}",
            f"{sum(fits)}/{len(fits)} within; worst {max(factors):.4f} x; planned {'exactly' if planned else 'WRONG'}",
            "lower bound",
            f"{sorted(factors)[len(factors) // 2]:.4f}",
            "",
            f"≤ {BYTES_FACTOR:g} x + {BYTES_PER_RANK >> 10} KB per rank",
            all(fits) and planned,
            {"wire / bound": factors},
        ),
        Row(
            f"the {len(still)} of them that move no bytes",
            f"at most {max(row[3] for row in still):,} bytes",
            "nothing",
            "",
            "",
            f"≤ {BYTES_PER_RANK >> 10} KB per rank",
            all(row[3] <= BYTES_PER_RANK * ranks for row in still),
            {"wire": [float(row[3]) for row in still]},
        ),
        Row(
            f"exchange of a switch, {of}",
            f"{sum(quick)}/{len(quick)} within; slowest {max(row[4] for row in measured) * 1e3:.0f} ms",
            "one plain all-to-all of the same bytes",
            f"{slowdowns[len(slowdowns) // 2]:.2f}",
            "",
            f"≤ {PAUSE_FACTOR:g} x + {PAUSE_SECONDS * 1e3:.0f} ms",
            all(quick),
            {"nbkit": [row[4] for row in measured], "raw": [row[5] for row in measured]},
        ),
        Row(
            f"state identical after a switch, {of}",
            f"{sum(same)}/{len(same)}",
            "state before the switch",
            "",
            "",
            "all",
            all(same),
        ),
    ]


if __name__ == "__main__":
    numbers, path = [int(word) for word in sys.argv[1:6]], Path(sys.argv[6])
    main(*numbers, path)
