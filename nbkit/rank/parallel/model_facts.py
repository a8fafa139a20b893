"""The facts about a model that decide how it can be distributed over ranks. They are found once and are equal on all
ranks.

fact_finder.py finds them by running the model. They can be sent to other ranks, except the shapes, which refer to
modules that every rank has. plan.py combines them with the strategy and the user's other choices (job_options.py) into
a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from nbkit.device_speeds import of_stages
from nbkit.errors import StrategyError
from nbkit.planner.stages import spelled, stage_ranges
from nbkit.rank.loss.counted_targets import Counted
from nbkit.rank.parallel.context.context_parallel import Positionwise
from nbkit.rank.parallel.experts.find import RoutedLayers
from nbkit.rank.parallel.module.copies import homes, skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.proof.outside_state import OutsideUse
from nbkit.rank.parallel.tensor.apply import parts_of
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan
from nbkit.rank.parallel.tensor.proof.verdict import Proof
from nbkit.rank.parallel.value_digest import digest_of
from nbkit.rank.parallel.zero3.gather_plan import GatherPlan
from nbkit.rank.parallel.zero3.unit import Casts
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout

Layouts = dict[str, Layout]
"""Name of a parameter or buffer -> the part of it that a rank holds."""


@dataclass(frozen=True)
class Coupled:
    """A reason why a batch computed in parts differs from the whole batch. It is found by computing both.

    what: the cause. numbers: the evidence. hint: what to write instead. trains: True if the cause is an auxiliary term.
    Then the job uses the mean over the parts, and trains with a warning.
    """

    what: str
    numbers: str
    hint: str
    trains: bool = False


class ModelShapes:
    """The shapes of a model, and the parts of its parameters that ranks can hold. Equal layouts are one object.

    skeleton: the model without memory for its parameters. whole: the undivided layouts of all parameters. buffers: the
    layouts of the buffers that a checkpoint saves.
    """

    def __init__(self, skeleton: nn.Module) -> None:
        self.skeleton = skeleton
        kept = skeleton.state_dict().keys()
        self.whole: Layouts = {n: Layout.whole(getattr(*at[0]).shape) for n, at in homes(skeleton).items()}
        self.buffers: Layouts = {n: Layout.whole(b.shape) for n, b in skeleton.named_buffers() if n in kept}
        self.digest = digest_of([(n, each.shape) for n, each in (*self.whole.items(), *self.buffers.items())])
        self._plans: dict[int, tuple[Proof, Mapping[str, str] | None, TensorPlan]] = {}
        self._parts: dict[tuple[int, int], tuple[TensorPlan, Layouts]] = {}
        self._shards: dict[tuple[Layout, int, int], Layout] = {}

    def like(self, skeleton: nn.Module) -> ModelShapes:
        """Return the shapes of `skeleton`, a copy of this skeleton in another dtype. Both share what was computed."""
        other = ModelShapes.__new__(ModelShapes)
        other.__dict__ |= self.__dict__ | {"skeleton": skeleton}
        return other

    def copied(self) -> nn.Module:
        """Return a copy of the skeleton that may be changed."""
        return skeleton_of(self.skeleton)

    def tensor_plan(self, size: int, user: Mapping[str, str] | None, proof: Proof) -> TensorPlan:
        """Return how the model is split over `size` ranks of a tensor axis; see `plan_of`."""
        known = self._plans.get(size)
        if known is None or known[0] is not proof or known[1] is not user:
            known = self._plans[size] = proof, user, plan_of(self.skeleton, size, user, proof)
        return known[2]

    def parts(self, plan: TensorPlan, index: int) -> Layouts:
        """Return the part of every parameter on rank `index` of a tensor axis.

        Raises StrategyError if the model cannot be split.
        """
        known = self._parts.get((plan.size, index))
        if known is None or known[0] != plan:
            made = dict(parts_of(self.copied(), plan, plan.size, index).layouts)
            known = self._parts[plan.size, index] = plan, made
        return known[1]

    def shard(self, layout: Layout, shards: int, index: int) -> Layout:
        """Return part `index` of `shards` of a tensor along dp. A scalar stays whole."""
        if not layout.local or shards == 1:
            return layout
        key = (layout, shards, index)
        if key not in self._shards:
            self._shards[key] = layout.part(0, shards, index)
        return self._shards[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"skeleton": self.skeleton}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["skeleton"])  # type: ignore[misc]


@dataclass(frozen=True)
class PipelineRank:
    """The part of a model on one pipeline rank: names of `parameters`, and layouts of its modules' `buffers`."""

    parameters: frozenset[str]
    buffers: Layouts


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model. A fact that was not found has its default.

    shapes: shapes of its parameters. chain: its blocks. no_chain: why there is no chain. costs: seconds per piece.
    hidden: (positions, width) of the tensor between blocks, None if it is not one such tensor. proof: the ways to split
    the model over a tensor axis, found by running them. gathers: which parameters ZeRO 3 gathers together.
    positionwise: result of running the model on parts of the positions. Both are None if nothing could be run. looked:
    names of the facts that were searched for (see `needed_facts`), None if all were, or if nothing can be run.

    routed: the layers whose experts can be spread over ranks. experts: name of the first mixture of experts, or "".
    hooked: the first parameter with a hook on its gradient, or "". astray: what in a copy of the model reads the
    original, or "". again: True if the callable can build the model again. rebuilt: True if the callable also builds
    the copies, because no copy is correct.

    coupled: what couples the rows of a batch, None if nothing was found. counted: set if the loss weights the targets
    that count, None if it weights rows. draws: the random numbers that the model draws itself, None if nothing was
    found. collectives: the first collective in the model or the loss, or "". outside: the state outside parameters and
    buffers that they change and read. changes: True if they change such state, even if they do not read it. caches:
    attributes that describe cached objects, which are computed again after a switch.
    """

    shapes: ModelShapes = field(compare=False, repr=False)
    chain: LayerChain | None = None
    no_chain: str = ""
    costs: tuple[float, ...] = ()
    hidden: tuple[int, int] | None = None
    proof: Proof = field(default_factory=Proof)
    gathers: GatherPlan | None = None
    positionwise: Positionwise | None = None
    looked: frozenset[str] | None = None
    routed: RoutedLayers = field(default_factory=RoutedLayers)
    experts: str = ""
    hooked: str = ""
    astray: str = ""
    again: bool = False
    rebuilt: bool = False
    coupled: Coupled | None = None
    counted: Counted | None = None
    draws: DrawPlan | None = None
    collectives: str = ""
    outside: OutsideUse | None = None
    changes: bool = False
    caches: frozenset[tuple[str, str]] = frozenset()
    _stages: dict[Any, list[PipelineRank]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)

    def missing(self, strategies: Iterable[Strategy]) -> frozenset[str]:
        """Return the facts that `strategies` need and that were not searched for; none if no example can be run."""
        if self.looked is None:
            return frozenset()
        wanted: frozenset[str] = frozenset().union(*map(needed_facts, strategies))
        return wanted - self.looked

    def require(self, strategy: Strategy) -> None:
        """Raise StrategyError if the model was not yet run for `strategy`, so that it is unknown whether it fits."""
        if self.missing([strategy]):
            raise StrategyError(
                f"It is not yet known if {strategy} can train this model.",
                numbers="before a switch, nbkit runs the model on a few rows to find out",
                hint=f"%strategy {strategy}   or   trainer.switch('{strategy}')",
            )

    def sendable(self) -> dict[str, Any]:
        """Return the facts that one rank sends to others, by name: all except the shapes, which every rank has."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "shapes"}

    def updated(self, facts: Mapping[str, Any]) -> ModelFacts:
        """Return these facts updated by `facts`. Facts that are equal stay the same objects."""
        new = {name: value for name, value in facts.items() if value != getattr(self, name)}
        return replace(self, **new) if new else self

    def digest(self, name: str) -> str:
        """Return the digest of one fact."""
        if name not in self._digests:
            self._digests[name] = digest_of(getattr(self, name))
        return self._digests[name]

    @property
    def block_names(self) -> tuple[str, ...]:
        """Return the names of the modules with which the pieces of the model begin.

        They are the blocks of the chain, or else the units that ZeRO 3 gathers one at a time, or else the whole model.
        """
        if self.chain is not None:
            return self.chain.blocks
        return self.gathers.units if self.gathers is not None and self.gathers.units else ("",)

    def stage_ranges(self, strategy: Strategy) -> list[tuple[int, int]]:
        """Return (first piece, one past the last piece) of each stage of `strategy`. Requires a chain."""
        assert self.chain is not None
        return stage_ranges(self.costs or [1.0] * len(self.chain), strategy)

    def cut(self, strategy: Strategy) -> str:
        """Return a description of the stages of a pipeline and their costs, or "" without a pipeline."""
        if strategy.pp == 1 or self.chain is None:
            return ""
        ranges = self.stage_ranges(strategy)
        words = f"stages of {spelled(ranges)} blocks"
        if not self.costs:
            return f"{words}, counted as equal"
        shares = [f"{sum(self.costs[start:stop]) / sum(self.costs):.0%}" for start, stop in ranges]
        return f"{words}, with {' + '.join(shares)} of the measured compute"

    def stages(self, strategy: Strategy) -> list[PipelineRank]:
        """Return the part of the model on each rank of the pipeline, or [] without a pipeline.

        Raises StrategyError if the model was not run for this strategy.
        """
        if strategy.pp > 1:
            self.require(strategy)
        if strategy.pp == 1 or self.chain is None:
            return []
        speeds = of_stages(strategy.speeds, strategy.mesh) if strategy.speeds else ()
        key = (strategy.pp, strategy.schedule, speeds)
        if key not in self._stages:
            self._stages[key] = self._staged(strategy, self.chain)
        return self._stages[key]

    def _staged(self, strategy: Strategy, chain: LayerChain) -> list[PipelineRank]:
        # Stages do not depend on the number of micro-batches. Use few, because long schedules take long to build.
        schedule = Schedule.of(strategy.schedule or "1f1b", strategy.pp, 2 * strategy.pp)
        ranges, buffers = self.stage_ranges(strategy), self.shapes.buffers
        pieces = {name: chain.piece_of(name) for name in buffers}
        found = []
        for rank in range(strategy.pp):
            own = [ranges[stage] for stage in schedule.stages_of(rank)]
            runs = {name for name, piece in pieces.items() if any(lo <= piece < hi for lo, hi in own)}
            held = {name: layout for name, layout in buffers.items() if name in runs}
            found.append(PipelineRank(frozenset().union(*(chain.holds(lo, hi) for lo, hi in own)), held))
        return found

    def casts(self, strategy: Strategy) -> Casts | None:
        """Return the parameters that `strategy` gathers in the dtype of autocast.

        With tp it is None, because the split layers differ from the layers that were observed.
        """
        if strategy.zero < 3 or strategy.shard == 1 or strategy.tp > 1 or self.gathers is None:
            return None
        return self.gathers.casts

    def tensor_plan(self, size: int, tp_plan: Mapping[str, str] | None) -> TensorPlan:
        """Return how the model is split over `size` ranks of a tensor axis. tp_plan: see JobOptions."""
        return self.shapes.tensor_plan(size, tp_plan, self.proof)

    def parts(self, size: int, index: int, tp_plan: Mapping[str, str] | None) -> Layouts:
        """Return the part of every parameter on rank `index` of `size` along tp.

        Raises StrategyError if the model cannot be split, or was not run for this.
        """
        self.require(Strategy(tp=size))
        return self.shapes.whole if size == 1 else self.shapes.parts(self.tensor_plan(size, tp_plan), index)


def needed_facts(strategy: Strategy) -> frozenset[str]:
    """Return the names of the facts that are needed to build `strategy` and to predict its cost.

    The set is empty if ranks only divide the rows.
    """
    found: set[str] = set()
    if strategy.tp > 1:
        found |= {f"tp={strategy.tp}", "chain"}
    if strategy.zero == 3:
        found |= {"gathers", "chain"}
    if strategy.pp > 1:
        found |= {"chain", "costs"}
    if strategy.cp > 1:
        found |= {"chain", "positionwise"}
    if strategy.ep > 1:
        found.add("routed")
    return frozenset(found)
