"""Measure every switch between eight strategies: requested during training, and called between steps.

During training, plan and module are prepared while steps run, so that only the rest is a pause. Each way has its own
tour through every ordered pair. The lower bound of bytes does not come from the plan: it counts one flag per element,
set from what the ranks hold before and after. Bytes are those of the network interface in a private namespace, less the
traffic of empty barriers. They include all messages of a switch, not only the state.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, trainer
from bench.rigs.loopback import measured
from bench.settings import Settings
from bench.table import Row, skipped
from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.errors import Stopped
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.parallel import fact_finder
from nbkit.rank.telemetry.health import bytes_held, reset_peak
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control import step_boundary
from nbkit.tensor_layout import Layout


class _Part(Tensor):
    """A placeholder of the global shape that says, like a DTensor, which boxes of it are on this rank."""

    part: Tensor
    extent: Layout

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(there.start), torch.Size(there.shape)) for _, there in self.extent.pieces
        ]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        about = TensorProperties(dtype=self.part.dtype)
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, about, torch.Size(self.extent.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        here = next(here for here, there in self.extent.pieces if torch.Size(there.start) == index.offset)
        return self.part[here.slices]


def stored(tensor: Tensor, layout: Layout) -> Tensor:
    """Return `tensor` as a value of a state dict. layout: which part of a global tensor it is."""
    placeholder = torch.empty((), dtype=tensor.dtype).expand(layout.shape).as_subclass(_Part)
    placeholder.part, placeholder.extent = tensor, layout
    return placeholder


RANKS = (4, 8)
SIZES = {4: {"width": 256, "layers": 8, "batch": 8}, 8: {"width": 128, "layers": 8, "batch": 16}}
QUICK = {"width": 64, "layers": 8, "batch": 16}
BYTES_FACTOR, BYTES_PER_RANK = 1.02, 64 << 10
PAUSE_FACTOR, PAUSE_SECONDS = 1.5, 0.150

Holding = dict[str, Layout]


@dataclass(frozen=True)
class Visit:
    """A measured switch.

    bound, moved, wire: bytes over all ranks. pause: seconds. prepare: seconds of the pause before anything moves. raw:
    seconds of one all-to-all of the same bytes. beside: seconds of preparation while the old model trained. proof:
    seconds that ranks waited for digests. The pause does not include beside and proof.
    """

    old: str
    new: str
    bound: int
    moved: int
    wire: int
    pause: float
    prepare: float
    beside: float
    proof: float
    raw: float
    identical: bool


def strategies(ranks: int) -> list[str]:
    """Return the eight strategies. Each exists on any even number of ranks."""
    half = ranks // 2
    return ["ddp", "zero1", "zero3", "tp", "pp", f"dp={half} tp=2", f"dp={half} pp=2", f"tp=2 pp={half}"]


def run(settings: Settings) -> list[Row]:
    """Return rows about bytes, pairs that move no bytes, pauses and identity, for each number of ranks."""
    if not settings.isolated:
        return [skipped("bytes of a switch", "lower bound", "no private network namespace here")]
    rows = []
    for ranks in settings.sizes(RANKS):
        clicked, called = (visits(settings, ranks, how) for how in ("click", "switch"))
        rows += _rows(ranks, clicked, called)
    return rows


def visits(settings: Settings, ranks: int, how: str) -> list[Visit]:
    """Switch through every ordered pair once and return the measurements.

    Each strategy is visited before, in each order of ranks that a switch may choose. how: the Worker's method that
    switches.
    """
    size = QUICK if settings.quick else SIZES.get(ranks, QUICK)
    found = []
    with Ranks("switch.switch", ranks, folder=settings.folder, **size) as job:
        route = tour(strategies(ranks))
        after_tp = [each for name in strategies(ranks) for each in ("tp", name)]
        for strategy in [*route[1 : 1 + ranks], *after_tp, route[0]]:
            job.ask("switch", strategy=strategy)
            job.ask("step")
        after = job.ask("holding")
        for old, new in pairwise(route):
            before = after
            said = job.ask(how, strategy=new)
            after = job.ask("holding")
            plan = ExchangePlan.of(before, after, dict.fromkeys({key for one in before for key in one}, 4))
            raw = max(job.ask("exchange", pairs=plan.pairs))
            job.ask("step")
            first = said[0]
            seconds = [max(one[name] for one in said) for name in ("pause", "prepare", "beside", "proof")]
            same = all(one["identical"] for one in said)
            bound = _bound(before, after)
            found.append(Visit(old, new, bound, first["moved"], first["wire"], *seconds, raw, same))
    return found


def tour(names: list[str]) -> list[str]:
    """Return a closed walk through every ordered pair once (Hierholzer)."""
    left = {a: [b for b in names if b != a] for a in names}
    stack, walk = [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def _bound(before: list[Holding], after: list[Holding]) -> int:
    """Return the bytes of the elements that ranks hold after the switch, but not before."""
    return sum(
        _lack(old.get(key), layout) for old, new in zip(before, after, strict=True) for key, layout in new.items()
    )


@cache
def _lack(before: Layout | None, after: Layout) -> int:
    flags = np.zeros(after.shape, dtype=bool)
    for _, box in after.pieces:
        flags[box.slices] = True
    for _, box in before.pieces if before is not None else ():
        flags[box.slices] = False
    return int(np.count_nonzero(flags)) * 4


def _rows(ranks: int, clicked: list[Visit], called: list[Visit]) -> list[Row]:
    measured = clicked + called
    moving, still = [one for one in measured if one.bound], [one for one in clicked if not one.bound]
    of = f"{len(clicked)} pairs of strategies, live and between steps, {ranks} ranks"
    above = [one.wire - BYTES_FACTOR * one.bound - BYTES_PER_RANK * ranks for one in measured]
    factors = sorted(one.wire / one.bound for one in moving)
    planned = all(one.moved == one.bound for one in measured)
    said = [one.wire - one.bound for one in measured]
    return [
        Row(
            f"wire bytes of a switch, {of}",
            f"{sum(excess <= 0 for excess in above)}/{len(above)} within; median {factors[len(factors) // 2]:.4f} x, "
            f"worst {factors[-1]:.4f} x; at most {max(said) / ranks / 1024:.0f} KB per rank beside the state; "
            f"moved {'exactly the bound' if planned else 'NOT the bound'}",
            "lower bound",
            "",
            "",
            f"≤ {BYTES_FACTOR:g} x + {BYTES_PER_RANK >> 10} KB per rank",
            max(above) <= 0 and planned,
            {"wire": [float(one.wire) for one in measured], "bound": [float(one.bound) for one in measured]},
        ),
        Row(
            f"the {len(still)} of them that move no bytes, live, wire bytes and pause",
            f"at most {max(one.wire for one in still) / ranks / 1024:.0f} KB per rank; "
            f"slowest {max(one.pause for one in still) * 1e3:.0f} ms",
            "nothing",
            "",
            "",
            f"≤ {BYTES_PER_RANK >> 10} KB per rank; ≤ {PAUSE_SECONDS * 1e3:.0f} ms",
            max(one.wire for one in still) <= BYTES_PER_RANK * ranks
            and max(one.pause for one in still) <= PAUSE_SECONDS,
            {"wire": [float(one.wire) for one in still], "pause": [one.pause for one in still]},
        ),
        _pause(f"live, {ranks} ranks", [one for one in clicked if one.bound]),
        _pause(f"called between two steps, {ranks} ranks", [one for one in called if one.bound]),
        Row(
            f"state identical after a switch, {of}",
            f"{sum(one.identical for one in measured)}/{len(measured)}",
            "state before the switch",
            "",
            "",
            "all",
            all(one.identical for one in measured),
        ),
    ]


def _pause(of: str, moving: list[Visit]) -> Row:
    late = [one.pause - PAUSE_FACTOR * one.raw - PAUSE_SECONDS for one in moving]
    slow = moving[late.index(max(late))]
    names = ("pause", "prepare", "beside", "proof")
    pause, prepare, beside, proof = (float(np.median([getattr(one, name) for one in moving])) * 1e3 for name in names)
    return Row(
        f"pause of a switch, the {len(moving)} that move bytes, {of}",
        f"{sum(excess <= 0 for excess in late)}/{len(late)} within; median {pause:.0f} ms, of it {prepare:.0f} ms "
        f"before anything moves, {beside:.0f} ms beside the training, then {proof:.0f} ms for the proof; "
        f"slowest beside its bar {slow.old} -> {slow.new}: "
        f"{slow.pause * 1e3:.0f} ms",
        f"one plain all-to-all of the same bytes, there {slow.raw * 1e3:.0f} ms",
        f"{float(np.median([one.pause / one.raw for one in moving])):.2f}",
        "",
        f"≤ {PAUSE_FACTOR:g} x + {PAUSE_SECONDS * 1e3:.0f} ms",
        max(late) <= 0,
        {name: [getattr(one, name) for one in moving] for name in (*names, "raw")},
    )


class Worker:
    """A rank with a GPT job that has made its first step."""

    def __init__(self, *, width: int, layers: int, batch: int, vocab: int = 256, block: int = 16) -> None:
        # All blocks get equal costs, so that the stages of two pipelines nest. Timed costs would depend on load.
        setattr(fact_finder, "measure_costs", lambda module, chain, call: (1.0,) * len(chain))  # noqa: B010
        of = config(width, layers, vocab=vocab, block=block)
        self.job = trainer(of, "ddp", batch=batch)
        self.job.fit(1)
        self.controls = TrainingRequestHandler()

    def switch(self, strategy: str) -> dict[str, Any]:
        """Switch between two steps. Return the result of Trainer.switch and the bytes of the network interface."""
        return self._watched(lambda act: act(lambda: self.job.switch(strategy)))

    def click(self, strategy: str) -> dict[str, Any]:
        """Do the same during training: another thread requests the switch, as a notebook does."""
        asked = Control(strategy, "switch", {"strategy": strategy})
        self.controls.results.clear()

        def follow(trainer: Any, record: dict[str, Any]) -> None:
            if record["step"] == first:
                number = step_boundary.inbox.acted + 1
                Thread(target=step_boundary.inbox.post, args=(number, "control", asked)).start()
            elif self.controls.results:
                raise Stopped("the switch has happened, at the same step on every rank")

        def train(act: Callable[[Callable[[], object]], None]) -> None:
            step_boundary.handlers["control"] = lambda control: act(lambda: self.controls.serve(control))
            with suppress(Stopped):
                self.job.fit(10_000)

        first, self.job._callbacks = self.job.step + 1, (follow,)
        found = self._watched(train)
        self.job._callbacks = ()
        return found

    def _watched(self, run: Callable[[Callable[[Callable[[], object]], None]], object]) -> dict[str, Any]:
        """Call `run` and return the measurements of the switch. run: calls its argument with the switch."""
        # Garbage of steps, loads and earlier switches does not count.
        gc.collect()
        _, idle = measured(lambda: None)
        seen: dict[str, int] = {}

        def act(switch: Callable[[], object]) -> None:
            now = bytes_held()[0]
            reset_peak()
            seen["wire"] = measured(switch)[1] - idle
            seen["extra"] = bytes_held()[1] - now

        run(act)
        done = self.job.job.switches[-1]
        return {
            **seen,
            "moved": done.moved_bytes,
            "beside": done.beside_s,
            "prepare": done.prepare_s,
            "pause": done.pause_s,
            "proof": done.proof_s,
            "identical": done.identical,
            "holds": sum(tensor.nbytes for tensor, _ in self._state().values()),
        }

    def holding(self) -> dict[str, Layout]:
        """Return the layouts of the weights and optimizer state that this rank holds."""
        return {key: layout for key, (_, layout) in self._state().items()}

    def step(self) -> float:
        """Make one step and return its loss."""
        return float(self.job.fit(1)[-1]["loss"])

    def exchange(self, pairs: dict[tuple[int, int], int]) -> float:
        """Return the seconds of one all-to-all between flat buffers. pairs: (from rank, to rank) -> bytes."""
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        given, taken = [pairs.get((rank, r), 0) for r in ranks], [pairs.get((r, rank), 0) for r in ranks]
        outgoing, incoming = torch.ones(sum(given), dtype=torch.uint8), torch.empty(sum(taken), dtype=torch.uint8)
        return measured(lambda: dist.all_to_all_single(incoming, outgoing, taken, given))[0]

    def save(self, path: str) -> float:
        """Write weights and optimizer state with torch.distributed.checkpoint, and return the seconds."""
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        state = {key: stored(tensor, layout) for key, (tensor, layout) in self._state().items()}
        return measured(lambda: state_dict_saver.save(state, checkpoint_id=path))[0]

    def load(self, path: str) -> tuple[float, bool]:
        """Read the checkpoint in the current layouts and remove it. Returns (seconds, whether it equals the state)."""
        held = self._state()
        fresh = {key: (torch.full_like(tensor, float("nan")), layout) for key, (tensor, layout) in held.items()}
        state = {key: stored(tensor, layout) for key, (tensor, layout) in fresh.items()}
        seconds = measured(lambda: state_dict_loader.load(state, checkpoint_id=path))[0]
        same = all(torch.equal(tensor, held[key][0]) for key, (tensor, _) in fresh.items())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        return seconds, same

    def many(self, strategies: list[str]) -> list[dict[str, float]]:
        """Make each switch and a step. Return open files, threads, resident bytes and seconds after each."""
        found = []
        for strategy in strategies:
            began = time.perf_counter()
            self.job.switch(strategy)
            self.job.fit(1)
            found.append(
                {
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "bytes": bytes_held()[0],
                    "seconds": time.perf_counter() - began,
                }
            )
        return found

    def _state(self) -> dict[str, tuple[Tensor, Layout]]:
        sharded_model, inner = self.job.job.sharded_model, self.job.job.optimizer.inner
        return job_state.weights(sharded_model) | job_state.per_element(sharded_model, inner)
