"""Compute the bytes that every rank holds and lacks under many strategies, without a list of ranks x tensors for each.

Tensors that are split in the same way (the same weight of every block) form a class. The place of a rank along tp and
dp decides which part of each tensor of a class it holds. Its place along pp decides how many tensors of the class it
holds. So a table of all strategies of 64 ranks is faster than the plan of one switch. The bytes are the same (the tests
compare them).

A tensor that its optimizer has to see as a whole may have an owner, which can be any rank. The plan of each strategy
names the owners, so these tensors are counted rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nbkit.mesh import Mesh
from nbkit.planner.exchange import overlap
from nbkit.planner.traffic import Rest
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.strategy import Strategy
from nbkit.techniques.experts import experts_of
from nbkit.tensor_layout import Layout, runs_of

Place = tuple[int, int, int, int, int]
"""Place of a rank: along pp, along tp, within its sharding group, among the ranks that share experts, and among those
that hold the same experts."""

_NOTHING = Layout((1,), (0,), ())
"""The part of another rank's expert that a rank holds: nothing."""


@dataclass(frozen=True)
class ReshardTraffic:
    """Bytes of a switch, per rank. received: from other ranks. kept: copied from the rank's own memory."""

    received: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the bytes that all ranks receive. No exchange can need fewer."""
        return sum(self.received)


@dataclass(frozen=True)
class _Class:
    """Parameters that are split in the same way.

    weight, state: bytes per element of the weight, and of its optimizer state.
    """

    names: frozenset[str]
    weight: int
    state: int
    trained: bool


class StateBytes:
    """The bytes of a model and its optimizer that every rank holds.

    kinds: name -> {"weight" or key of optimizer state: bytes per element}. blocks: for each block, name -> elements.
    """

    def __init__(
        self,
        facts: ModelFacts,
        kinds: Mapping[str, Mapping[str, int]],
        trained: set[str],
        blocks: Sequence[Mapping[str, int]] = (),
        *,
        options: JobOptions | None = None,
    ) -> None:
        self.facts, self.kinds, self.trained, self.blocks = facts, kinds, trained, blocks
        self.options = options or JobOptions()
        self._plans: dict[Strategy, ParallelPlan] = {}
        self._same: dict[Layout, Layout] = {}
        self._classes: dict[tuple[int | bool, ...], list[_Class]] = {}
        self._wholes: dict[int, list[dict[str, Layout]]] = {}
        self._counts: dict[tuple[object, ...], tuple[tuple[str, int], ...]] = {}
        self._shares: dict[tuple[object, ...], int] = {}
        self._cuts: dict[tuple[object, ...], Layout] = {}
        self._lacks: dict[tuple[int, int], int] = {}
        buffers, kept = dict(facts.shapes.skeleton.named_buffers()), facts.shapes.buffers
        self._buffers = {name: buffers[name].nbytes for name in kept}
        self._all_buffers = sum(buffer.nbytes for buffer in buffers.values())
        self._places: dict[tuple[Mesh, int, int], list[Place]] = {}

    @cached_property
    def state(self) -> dict[str, int]:
        """Return name -> bytes per element of the whole optimizer state."""
        return {name: sum(n for kind, n in one.items() if kind != "weight") for name, one in self.kinds.items()}

    def flow(self, old: Strategy, new: Strategy) -> ReshardTraffic:
        """Return the traffic of a switch. Each rank receives exactly the elements that it needs and does not have."""
        before, after = self.places(old), self.places(new)
        received, kept = [0] * len(after), [0] * len(after)
        known: dict[tuple[Place, Place], tuple[int, int]] = {}
        for rank, pair in enumerate(zip(before, after, strict=True)):
            if pair not in known:
                known[pair] = self._moved(old, new, *pair)
            received[rank], kept[rank] = known[pair]
        if whole := self._seen_whole:
            layouts = zip(*(self.plan(strategy).layouts.held for strategy in (old, new)), strict=True)
            for rank, (own, next_one) in enumerate(layouts):
                for name in whole & next_one.keys():
                    here = self.state[name] * overlap(own.get(name), next_one[name])
                    received[rank] += self.state[name] * next_one[name].numel - here
                    kept[rank] += here
        return ReshardTraffic(tuple(received), tuple(kept))

    @cached_property
    def _seen_whole(self) -> frozenset[str]:
        """Return the tensors that the optimizer has to see as a whole under some strategy."""
        return (self.options.whole | self.options.whole_in_tp) & self.kinds.keys()

    def plan(self, strategy: Strategy) -> ParallelPlan:
        """Return the plan of `strategy`, which names the owners of tensors."""
        if strategy not in self._plans:
            self._plans[strategy] = ParallelPlan(strategy, self.facts, self.options)
        return self._plans[strategy]

    def at_rest(self, strategy: Strategy) -> list[Rest]:
        """Return the bytes that each rank holds between two steps, including gradients."""
        known: dict[Place, Rest] = {}
        for place in self.places(strategy):
            if place not in known:
                known[place] = self._rest(strategy, place)
        found = [known[place] for place in self.places(strategy)]
        return [self._with_owned(strategy, *each) for each in enumerate(found)] if self._seen_whole else found

    def _with_owned(self, strategy: Strategy, rank: int, rest: Rest) -> Rest:
        """Add to `rest` the state of tensors that the optimizer sees as a whole, and the whole tensors of an owner."""
        plan, place = self.plan(strategy), self.places(strategy)[rank]
        here, held = self._stage(strategy, place), plan.layouts.held[rank]
        parameters, gradients = rest.parameters, rest.gradients
        state = sum(self.state[name] * held[name].numel for name in self._seen_whole & held.keys())
        for name in plan.owned if here is None else plan.owned & here:
            size = self.kinds[name]["weight"]
            own = size * (held[name].numel if name in held else 0)
            if name in plan.owners:
                parameters += own
            if name in self.trained and (name in plan.owners or strategy.zero == 2):
                gradients += own - size * self._cut(name, strategy, place, 2).numel
        return Rest(parameters, gradients, rest.optimizer + state, rest.buffers)

    def fractions(self, strategy: Strategy) -> tuple[list[list[float]], list[int]]:
        """Return (rows, index of the row of each rank).

        A row has, for each block, the fraction of its elements that a rank updates. Ranks with equal fractions share a
        row.
        """
        rows: dict[tuple[float, ...], int] = {}
        known: dict[Place, int] = {}
        totals = [max(sum(block.values()), 1) for block in self.blocks]
        for place in self.places(strategy):
            if place not in known:
                held = (self._held(strategy, place, number) for number in range(len(self.blocks)))
                row = tuple(round(here / total, 4) for here, total in zip(held, totals, strict=True))
                known[place] = rows.setdefault(row, len(rows))
        return [list(row) for row in rows], [known[place] for place in self.places(strategy)]

    def places(self, strategy: Strategy) -> list[Place]:
        """Return the place of every rank."""
        mesh, shards, ep = strategy.mesh, strategy.shard if strategy.zero else 1, strategy.ep
        if (mesh, shards, ep) not in self._places:
            everyone = map(mesh.index, range(mesh.size))
            self._places[mesh, shards, ep] = [
                (at["pp"], at["tp"], at["dp"] % shards, at["dp"] % ep, at["dp"] // ep if ep > 1 else 0)
                for at in everyone
            ]
        return self._places[mesh, shards, ep]

    def _moved(self, old: Strategy, new: Strategy, before: Place, after: Place) -> tuple[int, int]:
        received = kept = 0
        here, there = self._stage(old, before), self._stage(new, after)
        for alike in self._alike(old, new):
            wanted = len(alike.names if there is None else alike.names & there)
            if not wanted:
                continue
            shared = alike.names if here is None else alike.names & here
            both = len(shared if there is None else shared & there)
            some = next(iter(alike.names))
            for size, stage in ((alike.weight, 3), (0 if some in self._seen_whole else alike.state, 1)):
                if not size:
                    continue
                own, next_one = self._cut(some, old, before, stage), self._cut(some, new, after, stage)
                missing = both * self._lack(own, next_one) + (wanted - both) * next_one.numel
                received += size * missing
                kept += size * (wanted * next_one.numel - missing)
        for name, size in self._buffers.items():
            if self._runs(new, after, name):
                if self._runs(old, before, name):
                    kept += size
                else:
                    received += size
        return received, kept

    def _rest(self, strategy: Strategy, place: Place) -> Rest:
        sums, here = [0, 0, 0], self._stage(strategy, place)
        for alike in self._alike(strategy):
            count = len(alike.names if here is None else alike.names & here)
            some = next(iter(alike.names))
            state = 0 if some in self._seen_whole else alike.state
            sizes = (alike.weight, alike.weight if alike.trained else 0, state)
            for number, (size, stage) in enumerate(zip(sizes, (3, 2, 1), strict=True)):
                sums[number] += count * size * self._cut(some, strategy, place, stage).numel
        own = (size for name, size in self._buffers.items() if self._runs(strategy, place, name))
        return Rest(sums[0], sums[1], sums[2], self._all_buffers if here is None else sum(own))

    def _held(self, strategy: Strategy, place: Place, number: int) -> int:
        """Return the number of elements of a block that the rank at `place` updates. Owners are ignored."""
        here, tp = self._stage(strategy, place), strategy.tp
        where = (number, id(here), tp, bool(strategy.experts))
        if where not in self._counts:
            block = self.blocks[number]
            inside = [
                [name for name in alike.names if name in block and (here is None or name in here)]
                for alike in self._alike(strategy)
            ]
            self._counts[where] = tuple((min(names), len(names)) for names in inside if names)
        # Equal blocks are counted only once, if a rank holds the same part of them.
        spread = strategy.ep, strategy.experts
        key = (self._counts[where], tp, place[1:], strategy.zero > 0 and strategy.shard, *spread)
        if key not in self._shares:
            self._shares[key] = sum(n * self._cut(name, strategy, place, 1).numel for name, n in self._counts[where])
        return self._shares[key]

    def _stage(self, strategy: Strategy, place: Place) -> frozenset[str] | None:
        """Return the names of the parameters on the stage of `place`; None for all."""
        stages = self.facts.stages(strategy)
        return stages[place[0]].parameters if stages else None

    def _runs(self, strategy: Strategy, place: Place, buffer: str) -> bool:
        stages = self.facts.stages(strategy)
        return not stages or buffer in stages[place[0]].buffers

    def _cut(self, name: str, strategy: Strategy, place: Place, stage: int) -> Layout:
        """Return the layout of a tensor at `place`. stage: the first ZeRO stage that shards it.

        stage: 3 for weights, 2 for gradients, 1 for optimizer state.
        """
        whole = self._whole(strategy.tp)[place[1]][name]
        if strategy.ep > 1 and name in self.facts.routed.place_of:
            return self._cut_of_experts(name, whole, strategy, place, stage)
        if strategy.zero < stage:
            return whole
        key = (id(whole), strategy.shard, place[2])
        if key not in self._cuts:
            layout = self.facts.shapes.shard(whole, strategy.shard, place[2])
            self._cuts[key] = self._same.setdefault(layout, layout)
        return self._cuts[key]

    def _cut_of_experts(self, name: str, whole: Layout, strategy: Strategy, place: Place, stage: int) -> Layout:
        layer, first, many, every = self.facts.routed.place_of[name]
        mine = experts_of(strategy.experts, layer, every, strategy.ep, place[3])
        if many == 1 and first not in mine:
            return _NOTHING
        shards = strategy.dp // strategy.ep if stage < 3 and strategy.zero >= stage else 1
        key = id(whole), mine, shards, place[4] if shards > 1 else 0
        if key not in self._cuts:
            layout = self.facts.shapes.shard(whole if many == 1 else whole.cut_runs(0, runs_of(mine)), *key[2:])
            self._cuts[key] = self._same.setdefault(layout, layout)
        return self._cuts[key]

    def _alike(self, *strategies: Strategy) -> list[_Class]:
        """Return the classes of parameters that are split in the same way under these strategies."""
        sizes, moved = tuple(each.tp for each in strategies), any(each.experts for each in strategies)
        if (*sizes, moved) not in self._classes:
            parts = [part for size in sizes for part in self._whole(size)]
            found: dict[tuple[int, int, bool, tuple[Any, ...]], list[str]] = {}
            for name, one in self.kinds.items():
                experts = self.facts.routed.place_of.get(name, ())
                marks = (*map(id, (part[name] for part in parts)), experts if moved else experts[1:])
                marks += (name in self._seen_whole,)
                found.setdefault((one["weight"], self.state[name], name in self.trained, marks), []).append(name)
            self._classes[*sizes, moved] = [_Class(frozenset(names), *key[:3]) for key, names in found.items()]
        return self._classes[*sizes, moved]

    def _whole(self, size: int) -> list[dict[str, Layout]]:
        """Return, for each place along tp, name -> layout before dp shards it. Equal layouts are one object."""
        if size not in self._wholes:
            parts = [self.facts.parts(size, index, self.options.tp_plan) for index in range(size)]
            self._wholes[size] = [
                {name: self._same.setdefault(layout, layout) for name, layout in part.items()} for part in parts
            ]
        return self._wholes[size]

    def _lack(self, own: Layout, wanted: Layout) -> int:
        if own is wanted or own.local == own.shape:
            return 0
        key = (id(own), id(wanted))
        if key not in self._lacks:
            self._lacks[key] = wanted.numel - overlap(own, wanted)
        return self._lacks[key]
