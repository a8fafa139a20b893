"""The layouts that every rank would hold under a strategy, found on one rank. Nothing is built or sent.

The same functions decide here and when a sharded model is built: `stage_ranges` for stages, the tensor plan for parts,
`Layout.part` for shards. So a sharded model that is built holds the same layouts. The tests compare them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from nbkit.device_speeds import of_stages
from nbkit.planner.stages import stage_ranges
from nbkit.rank.parallel.model_facts import need_facts
from nbkit.rank.parallel.module.copies import homes, skeleton_of
from nbkit.rank.parallel.options import (
    Options,
    keeps_whole,
    need_chain,
    need_copies,
    need_gathers,
    need_outside,
    need_positionwise,
    need_rows,
    need_whole_gradients,
)
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.tensor.apply import parts_of
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass(frozen=True)
class RankLayouts:
    """The layouts of every rank, each as name -> layout.

    weights: of the weights between steps. held: of what the optimizer updates. buffers: of the buffers that a
    checkpoint holds.
    """

    weights: tuple[dict[str, Layout], ...]
    held: tuple[dict[str, Layout], ...]
    buffers: tuple[dict[str, Layout], ...]


class ShardLayouts:
    """The layouts of one model, cached by strategy. Equal layouts are one object, which plans rely on."""

    def __init__(self, skeleton: nn.Module, options: Options) -> None:
        self.skeleton, self.options = skeleton, options
        self._known: dict[Strategy, RankLayouts] = {}
        self._parts: dict[tuple[int, int], dict[str, Layout]] = {}
        self._shards: dict[tuple[Layout, int, int], Layout] = {}
        kept = skeleton.state_dict().keys()
        self._buffers = {name: Layout.whole(buffer.shape) for name, buffer in skeleton.named_buffers() if name in kept}
        self._ranks_of: dict[tuple[Any, ...], list[tuple[frozenset[str], dict[str, Layout]]]] = {}

    def of(self, strategy: Strategy) -> RankLayouts:
        """Return the layouts of all ranks. Raise StrategyError, with the reason, if the model cannot be split."""
        if strategy not in self._known:
            self._known[strategy] = self._made(strategy)
        return self._known[strategy]

    def _made(self, strategy: Strategy) -> RankLayouts:
        self.check(strategy)
        mesh = strategy.mesh
        weights, held, buffers = [], [], []
        stages = self.stages(strategy)
        for rank in range(mesh.size):
            at = mesh.index(rank)
            names, kept = stages[at["pp"]] if stages else (None, self._buffers)
            mine = {
                name: layout
                for name, layout in self.split(strategy.tp, at["tp"]).items()
                if names is None or name in names
            }
            shards = {
                name: self.shard(layout, strategy.shard, at["dp"] % strategy.shard) for name, layout in mine.items()
            }
            weights.append(shards if strategy.zero == 3 else mine)
            held.append(shards if strategy.zero else mine)
            buffers.append(kept)
        return RankLayouts(tuple(weights), tuple(held), tuple(buffers))

    def check(self, strategy: Strategy) -> None:
        """Raise StrategyError, with the reason, if the model cannot be split or this was not tried. Takes no time."""
        need_facts(self.options, strategy)
        if not keeps_whole(strategy):
            need_copies(self.options, strategy)
        need_whole_gradients(self.options, strategy)
        need_rows(self.options, strategy)
        need_outside(self.options, strategy)
        need_chain(self.options, strategy)
        need_gathers(self.options, strategy)
        need_positionwise(self.options, strategy)
        self.stages(strategy)
        self.split(strategy.tp, 0)

    def stages(self, strategy: Strategy) -> list[tuple[frozenset[str], dict[str, Layout]]]:
        """Return the names of the parameters on each rank of the pipeline, and its buffers; [] without a pipeline.

        Raises StrategyError if this was not tried.
        """
        if strategy.pp > 1:
            need_facts(self.options, strategy)
        chain: LayerChain | None = self.options.chain
        if strategy.pp == 1 or chain is None:
            return []
        speeds = of_stages(strategy.speeds, strategy.mesh) if strategy.speeds else ()
        key = (strategy.pp, strategy.schedule, speeds)
        if key not in self._ranks_of:
            self._ranks_of[key] = self._staged(strategy, chain)
        return self._ranks_of[key]

    def _staged(self, strategy: Strategy, chain: LayerChain) -> list[tuple[frozenset[str], dict[str, Layout]]]:
        # The ranks of stages do not depend on the number of micro-batches, and long lists take long to make.
        schedule = Schedule.of(strategy.schedule or "1f1b", strategy.pp, 2 * strategy.pp)
        ranges = stage_ranges(self.options.costs or [1.0] * len(chain), strategy)
        pieces = {name: chain.piece_of(name) for name in self._buffers}
        found = []
        for rank in range(strategy.pp):
            own = [ranges[stage] for stage in schedule.stages_of(rank)]
            runs = {name for name, piece in pieces.items() if any(lo <= piece < hi for lo, hi in own)}
            buffers = {name: layout for name, layout in self._buffers.items() if name in runs}
            found.append((frozenset().union(*(chain.holds(lo, hi) for lo, hi in own)), buffers))
        return found

    def split(self, size: int, index: int) -> dict[str, Layout]:
        """Return what rank `index` of `size` along tp holds of every parameter. Raise StrategyError if it cannot be
        split."""
        need_facts(self.options, Strategy(tp=size))
        if (size, index) not in self._parts:
            self._parts[size, index] = (
                {name: Layout.whole(getattr(*places[0]).shape) for name, places in homes(self.skeleton).items()}
                if size == 1
                else dict(
                    parts_of(skeleton_of(self.skeleton), self.options.plan(self.skeleton, size), size, index).layouts
                )
            )
        return self._parts[size, index]

    def shard(self, layout: Layout, shards: int, index: int) -> Layout:
        """Return part `index` of `shards` of a tensor along dp. A scalar stays whole."""
        if not layout.local or shards == 1:
            return layout
        key = (layout, shards, index)
        if key not in self._shards:
            self._shards[key] = layout.part(0, shards, index)
        return self._shards[key]
