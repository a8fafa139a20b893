"""A fake run: the records that N ranks would write, written by the writer that ranks use."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from nbkit.mesh import Mesh
from nbkit.planner import forecast
from nbkit.planner.job_facts import Facts, Weight, cuts_for, held
from nbkit.planner.traffic import Rest, per_step
from nbkit.records.record_file import Overview, RecordFile
from nbkit.records.records import (
    LISTEN_EVERY,
    Detail,
    EventRecord,
    GpuHealth,
    Group,
    Header,
    HealthRecord,
    MemoryPart,
    MemoryRecord,
    PipelineOp,
    Record,
    StepRecord,
    TimedCall,
    Traffic,
)
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

WEIGHT = 4 << 20  # bytes of all parameters
HIDDEN = 8 << 20  # bytes of the hidden states of a whole batch at a boundary
LATE = 0.004
MS = 1_000_000
WEIGHTS = [Weight(f"block{i}", (256, 512), blocks=(i,), tp_dim=0) for i in range(8)]
FACTS = Facts(width=256, blocks=8, sequence=64, batch=64, heads=8)


class FakeRun:
    """Writes what the ranks of a job would write, at each call of `step`. late: a rank that is slow."""

    def __init__(self, folder: Path, world: int, strategy: str, *, late: int | None = None, node: int = 8) -> None:
        self.folder, self.world, self.late, self.number = folder, world, late, 0
        self.between = 0.0  # seconds from a step to the next
        self.of_rows = False  # True: each sample is one token, as for images
        self.dead: set[int] = set()
        self.slow = False  # True: the next step takes four times as long
        self.random = random.Random(7)
        self.files, self.overviews = [], []
        self.groups: list[Group] = []
        self.now = 1_000 * MS
        self._become(strategy)
        for rank in range(world):
            self.files.append(
                RecordFile(
                    folder / "telemetry" / f"rank{rank}.jsonl", lambda part, rank=rank: self._head(rank, part, node)
                )
            )
            self.overviews.append(Overview(self.files[-1].path))
        self.event("run_started", strategy=str(self.strategy), arithmetic="", total=0)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def event(self, kind: str, **values: object) -> None:
        for rank in range(self.world):
            self._write(
                rank, EventRecord(self.number, ns=self.now, event={"kind": kind, "step": self.number, **values})
            )

    def switch(self, strategy: str) -> None:
        old = str(self.strategy)
        self._become(strategy)
        self.event("switch", old=old, new=str(self.strategy), moved_bytes=WEIGHT, pause_s=0.4, identical=True)
        for rank in range(self.world):
            for group in self.groups:
                if rank in group.members:
                    self._write(rank, group)

    def step(self) -> None:
        self.number += 1
        parts = [self._parts(rank) for rank in range(self.world)]
        longest = max(sum(one.values()) for one in parts)
        for rank, one in enumerate(parts):
            one["exposed"] += longest - sum(one.values())  # the others wait for the late rank
            numbers = {
                "step": self.number,
                "loss": 1.2 + 3.0 / (1 + 0.05 * self.number) + self.random.gauss(0, 0.03),
                "tokens": 4096.0 * self.world,
                "seconds": longest + self.between,
                "strategy": str(self.strategy),
                "lr": 3e-4,
            }
            experts = self._experts(rank)
            if experts:
                numbers["imbalance"] = 1.5 + 0.5 / self.number
            if self.of_rows:
                numbers["samples"] = numbers["tokens"]
            record = StepRecord(
                self.number,
                start_ns=self.now,
                seconds=longest,
                parts=one,
                traffic=self._traffic(rank, one["exposed"]),
                numbers=numbers,
                cpu_seconds=longest,
                own_seconds=longest * 0.004,
                experts=experts,
            )
            self._write(rank, record)
            if self.number in (1, 2, 3) or self.number % 50 == 0:
                self._write(rank, self._detail(rank, one))
            if self.number == 2 or self.number % 100 == 0:
                self._write(rank, self._memory(rank))
        self.now += round((longest + self.between) * 1e9)

    def _become(self, text: str) -> None:
        self.strategy, self.since = Strategy.parse(text, self.world), self.number
        mesh: Mesh = self.strategy.mesh
        self.groups = [
            Group(f"{axis} {self.since}.{i} [{members[0]},..]", axis, members)
            for axis in ("dp", "tp", "pp")
            if mesh.degree(axis) > 1
            for i, members in enumerate(mesh.groups(axis))
        ]
        forecast.append(self.folder, forecast_of(WEIGHTS, FACTS, self.strategy, step=self.number))

    def health(self, *, node: int = 8, gpus: bool = True) -> None:
        for rank in range(self.world):
            first = rank % node == 0
            seen = []
            for one in range(rank, min(rank + node, self.world)) if gpus and first else ():
                late = one == self.late
                mhz, slowed = (1400.0, "thermal slowdown") if late else (1980.0, "")
                seen.append(
                    GpuHealth(f"GPU-{one}", one % node, mhz, 1980.0, 60.0 + one % 9, 640.0, 700.0, 0.97, slowed)
                )
            record = HealthRecord(self.number, self.now, cpu=0.99, rss=300 << 20, gpu=f"GPU-{rank}" if gpus else "")
            if first:
                record = replace(record, load=3.2, cores=16, mhz=2400.0, gpus=tuple(seen))
            self._write(rank, record)

    def _head(self, rank: int, part: int, node: int) -> list[Record]:
        header = Header(
            rank,
            self.world,
            part,
            host=f"node{rank // node}",
            strategy=str(self.strategy),
            unix_s=1.7e9,
            base_bytes=1 << 20,
        )
        return [header, *(group for group in self.groups if rank in group.members)]

    def _write(self, rank: int, record: Record) -> None:
        if rank in self.dead:
            return
        self.files[rank].write([record])
        if isinstance(record, StepRecord):
            self.overviews[rank].add(record)

    def _parts(self, rank: int) -> dict[str, float]:
        slow = LATE if rank == self.late else 0.0
        draw = self.random.uniform
        parts = {
            "compute": draw(0.0098, 0.0102) + slow,
            "exposed": 0.002 if self.strategy.pp == 1 else 0.001,
            "bubble": 0.0 if self.strategy.pp == 1 else draw(0.0028, 0.003),
            "data": draw(0.0003, 0.0005),
            "optimizer": 0.0012,
            "other": 0.0003,
        }
        return {part: seconds * (4 if self.slow else 1) for part, seconds in parts.items()}

    def _experts(self, rank: int) -> dict[str, float]:
        """Return the tokens of each of this rank's experts, of 8 that `ep` ranks share. Later ranks have more."""
        if self.strategy.ep == 1:
            return {}
        many, place = 8 // self.strategy.ep, self.strategy.mesh.index(rank)["dp"] % self.strategy.ep
        return {str(n): 1000.0 + 250 * n for n in range(many * place, many * (place + 1))}

    def _traffic(self, rank: int, exposed: float) -> tuple[Traffic, ...]:
        rows = []
        at = self.strategy.mesh.index(rank)
        for group in self.groups:
            if rank not in group.members:
                continue
            if group.axis == "pp":
                stage = at["pp"]
                for op, on in (("send", 1), ("recv", -1)):
                    for step in (on, -on):
                        if 0 <= stage + step < self.strategy.pp:
                            peer = group.members[stage + step]
                            count = self.strategy.microbatches or 1
                            rows.append(
                                Traffic(op, "pp", group.label, peer, count, self._hidden(), count, 0.0004, 0.0001)
                            )
                continue
            calls = 4 if group.axis == "tp" else 1
            size = 4 * self._hidden() if group.axis == "tp" else WEIGHT // self.strategy.tp // self.strategy.pp
            blocked = exposed if group is self._last_group(rank) else 0.0
            rows.append(
                Traffic("all_reduce", group.axis, group.label, None, calls, size, *self._timed(calls, blocked), blocked)
            )
        return tuple({(row.op, row.group, row.peer): row for row in rows}.values())

    def _timed(self, calls: int, blocked: float) -> tuple[int, float]:
        """Return (timed calls, blocked seconds): ranks time the first steps of a strategy, then some steps."""
        heard = self.number - self.since <= 3 or self.number % LISTEN_EVERY == 0
        return (calls, blocked + 0.001) if heard else (0, 0.0)

    def _hidden(self) -> int:
        """Return the size of the hidden states that a rank sends: sequence parallelism splits the positions."""
        return HIDDEN // 2 // self.strategy.dp // self.strategy.tp

    def _last_group(self, rank: int) -> Group | None:
        own = [group for group in self.groups if rank in group.members]
        return next((group for group in own if group.axis != "pp"), own[0] if own else None)

    def _detail(self, rank: int, parts: dict[str, float]) -> Detail:
        laps, at = [], self.now
        for state, part, share in (
            ("data", "data", 1), ("forward", "compute", 0.35), ("backward", "compute", 0.65), ("bubble", "bubble", 1),
            ("wait dp", "exposed", 1), ("optimizer", "optimizer", 1), ("other", "other", 1),
        ):  # fmt: skip
            stop = at + round(parts[part] * share * 1e9)
            if stop > at:
                laps.append((state, at, stop))
            at = stop
        ops = []
        if self.strategy.pp > 1 and self.strategy.schedule and self.strategy.microbatches:
            schedule = Schedule.of(self.strategy.schedule, self.strategy.pp, self.strategy.microbatches)
            stage = self.strategy.mesh.index(rank)["pp"]
            line = simulate(
                schedule, forward=0.4 * MS, backward_input=0.4 * MS, backward_weight=0.4 * MS, transfer=0.15 * MS
            )
            ops = [
                PipelineOp(s.op.kind, s.op.stage, s.op.micro, self.now + round(s.start), self.now + round(s.stop))
                for s in line.spans[stage]
            ]
        group = self._last_group(rank)
        call = TimedCall("all_reduce", group.label if group else "", None, 0, WEIGHT, self.now, self.now, self.now)
        return Detail(self.number, tuple(laps), (call,), tuple(ops))

    def _memory(self, rank: int) -> MemoryRecord:
        rest = forecast.in_force(forecast.read(self.folder), self.number).memory[rank]
        known = rest.total
        return MemoryRecord(
            self.number,
            parameters=rest.parameters,
            gradients=rest.gradients,
            optimizer=rest.optimizer,
            buffers=rest.buffers,
            now=known + (2 << 20),
            peak=known + (3 << 20) + (1 << 20),
            named=(
                MemoryPart("activations", "blocks.*.mlp", 2 << 20),
                MemoryPart("working", "loss", 1 << 20),
                MemoryPart("activations", "blocks.*.attention", 768 << 10),
                MemoryPart("optimizer", "blocks.*.mlp", rest.optimizer),
                MemoryPart("parameters", "blocks.*.mlp", rest.parameters),
                MemoryPart("gradients", "blocks.*.mlp", rest.gradients),
                MemoryPart("buckets", "", 256 << 10),
                MemoryPart("buffers", "blocks.*.attention", rest.buffers),
            ),
        )


def forecast_of(weights: list[Weight], facts: Facts, strategy: Strategy, *, step: int = 0) -> forecast.Forecast:
    """Return what the formulas predict for a job whose optimizer is Adam in fp32."""
    ranks, cuts = range(strategy.mesh.size), cuts_for(weights, strategy, None)

    def rest(rank: int) -> Rest:
        sizes = [
            sum(held(weight, strategy, rank, cuts, sharded=strategy.zero >= stage) for weight in weights)
            for stage in (3, 2, 1)
        ]
        return Rest(4 * sizes[0], 4 * sizes[1], 8 * sizes[2], 64 << 10)

    traffic = [per_step(weights, facts, strategy, rank) for rank in ranks]
    memory = tuple(rest(rank) for rank in ranks)
    peaks = tuple((one.parameters, one.gradients, one.optimizer, 3 << 20, 1 << 20) for one in memory)
    return forecast.Forecast(step, str(strategy), memory, forecast.terms_of(traffic), peaks=peaks)
