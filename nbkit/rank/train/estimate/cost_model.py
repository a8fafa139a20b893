"""Apply the formulas of nbkit.planner to a job under any strategy, with the sizes of its real model and batch.

Memory and the traffic of the data axis depend only on the parameters. The traffic of tp, pp and cp depends on the
hidden states. It is known only for a chain of transformer blocks, each with an attention and an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from nbkit.errors import NbkitError
from nbkit.planner.exchange import orders, placed
from nbkit.planner.forecast import Forecast, Term, terms_of
from nbkit.planner.job_facts import Cuts, Facts, Routed, Weight, held
from nbkit.planner.link_speed import between_nodes
from nbkit.planner.stages import best_places, place, ranks_of_stages
from nbkit.planner.step import StepTraffic, StepUnit, link_seconds
from nbkit.planner.traffic import Bytes, TrafficTerm, per_step, wire_bytes
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.module.forward_wrapper import wrapped_by
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.tensor.apply import parts_of
from nbkit.rank.parallel.tensor.sequence_parallel import SequenceParallelBlock
from nbkit.rank.parallel.whole_tensors import exchanges
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.estimate.peak_bytes import PeakBytes
from nbkit.rank.train.estimate.state_bytes import StateBytes
from nbkit.strategy import Strategy

Kinds = Mapping[str, Mapping[str, int]]
"""Bytes per element of each parameter and of its optimizer state; see job_state.bytes_per_element."""


class CostModel:
    """Predicts memory and traffic of a job, as it is now, under any strategy.

    blocks: name of a block -> {parameter: number of elements}. fits: see DataHooks.
    """

    def __init__(
        self, builder: Builder, kinds: Kinds, fits: Callable[[Strategy], Any], *, before: CostModel | None = None
    ) -> None:
        """before: an older cost model of the same builder, whose measurements of the model are reused."""
        self.kinds, self.fits, self.config = kinds, fits, builder.config
        self.skeleton, self.facts, self.options = builder.skeleton, builder.facts, builder.options
        self._link = builder.link
        self._node_of = self._link.node_of if self._link is not None else ()
        self._several_nodes = len(set(self._node_of)) > 1
        self.trained = self._trained()
        self.blocks = _blocks(self.skeleton, self.facts.chain)
        blocks = list(self.blocks.values())
        self.census = StateBytes(self.facts, self.kinds, self.trained, blocks, options=self.options)
        # Include the optimizer state that the first step will create: memory needs room for it.
        foreseen = _foreseen(builder, self.kinds)
        self.later = self.census
        if foreseen is not self.kinds:
            self.later = StateBytes(self.facts, foreseen, self.trained, blocks, options=self.options)
        self.peaks: PeakBytes = PeakBytes(builder, self.later, before=before.peaks if before is not None else None)
        self._partial: dict[int, tuple[frozenset[str], bool]] = {}
        self._terms: dict[Strategy, list[list[TrafficTerm]]] = {}

    def holds(self, kinds: Kinds, builder: Builder) -> bool:
        """Return True if this cost model is still valid.

        It becomes invalid when the kept state changes, as in the optimizer's first step, or when more facts about the
        model are known.
        """
        same = self.facts is builder.facts and self.options == builder.options
        return same and self.kinds == kinds and self.trained == self._trained()

    def _trained(self) -> set[str]:
        return {name for name, p in self.skeleton.named_parameters() if p.requires_grad}

    def forecast(self, strategy: Strategy, *, since: int) -> Forecast:
        """Return the forecast for the steps after `since`.

        Call it after an optimizer step, when the optimizer state exists and can be counted.
        """
        rest, traffic = tuple(self.census.at_rest(strategy)), self.of_all_ranks(strategy)
        return Forecast(since, str(strategy), rest, traffic, self.between_nodes(strategy), self._peaks(strategy))

    def _peaks(self, strategy: Strategy) -> tuple[tuple[int, ...], ...]:
        """Return the parts of the peak of each rank. Empty if the model has not been run for these degrees yet."""
        batch = getattr(self.fits(strategy), "total", None)
        if not batch or not self.peaks.knows(strategy.tp, strategy.cp):
            return ()
        with suppress(NbkitError):
            places = self.peaks.of(strategy, batch)
            own = [places[strategy.mesh.index(rank)["pp"]] for rank in range(strategy.mesh.size)] if places else []
            return tuple((one.parameters, one.gradients, one.optimizer, one.activations, one.working) for one in own)
        return ()

    def between_nodes(self, strategy: Strategy) -> float | None:
        """Return the bytes that all ranks together send to other nodes in a step; None on one node, or if unknown."""
        terms = self.terms(strategy)
        if not self._several_nodes or (not terms and strategy.mesh.size > 1):
            return None
        at = [strategy.mesh.index(rank)["pp"] for rank in range(strategy.mesh.size)]
        return sum(between_nodes(terms[stage], strategy, rank, self._node_of) for rank, stage in enumerate(at))

    def ordered(self, strategy: Strategy) -> Strategy:
        """Return `strategy` with the order of ranks for which the links need the least time.

        An order that `order=` fixes stays. On one node, choose the stages by the speeds of the devices instead.
        """
        found = orders(strategy, one_node=not self._several_nodes)
        return min(found, key=self._link_seconds) if self._several_nodes else self._by_speed(strategy)

    def placed(self, strategy: Strategy, *, now: Strategy) -> Strategy:
        """Return `strategy` with the order of ranks for a switch from `now`; see planner/exchange.py.

        Raises StrategyError if the model cannot be split.
        """
        if str(strategy) == str(now):
            return now
        return placed(
            self._by_speed(strategy),
            lambda order: (self._link_seconds(order), self.census.flow(now, order).total),
            one_node=not self._several_nodes,
        )

    def _by_speed(self, strategy: Strategy) -> Strategy:
        """Return `strategy` with pipeline stages that suit the speeds of its devices.

        Fixed `places=` and `order=` stay. On several nodes nothing changes, because it is more important that
        neighbours share a node.
        """
        batch, chain = getattr(self.fits(strategy), "total", None), self.facts.chain
        if not strategy.speeds or strategy.places or strategy.order or self._several_nodes or not batch or not chain:
            return strategy
        return best_places(strategy, batch, tuple(self.facts.costs or (1.0,) * len(chain)))

    def _link_seconds(self, order: Strategy) -> float:
        """Return the seconds in which the busiest rank sends its data of a step.

        Return 0 if the order makes no difference, or if the links are unknown, as after a resize.
        """
        if self._link is None or not self._several_nodes or order.mesh.size != len(self._node_of):
            return 0.0
        took = (link_seconds(order, own, self._link) for own in self.terms(order))
        return float(f"{max(took, default=0.0):.2g}")

    def terms(self, strategy: Strategy) -> list[list[TrafficTerm]]:
        """Return, for each stage of a pipeline, what its busiest rank sends in a step; [] if unknown."""
        if strategy not in self._terms:
            mesh = strategy.mesh
            ranks: Sequence[int] = mesh.ranks("pp", 0)
            if self._plan(strategy) is not None and (every := self._made(strategy, range(mesh.size))):
                alike = [[rank for rank in range(mesh.size) if mesh.index(rank)["pp"] == at] for at in range(mesh.pp)]
                ranks = tuple(max(some, key=lambda rank: wire_bytes(every[rank])) for some in alike)
            self._terms[strategy] = self._made(strategy, ranks)
        return self._terms[strategy]

    def _plan(self, strategy: Strategy) -> ParallelPlan | None:
        """Return the plan of `strategy`, if tensors have owners under it."""
        if not (self.options.whole or self.options.whole_in_tp):
            return None
        plan = self.census.plan(strategy)
        return plan if plan.owned else None

    def sends(self, strategy: Strategy) -> StepTraffic | None:
        """Return the traffic and the update of the busiest rank in a step; None if unknown.

        The result also tells the computation that can overlap with the traffic.
        """
        terms = self.terms(strategy)
        if not terms and strategy.mesh.size > 1:
            return None
        busiest = max(terms, key=lambda own: wire_bytes([term for term in own if term.axis != "pp"]), default=[])
        return StepTraffic(
            busiest,
            self.census.at_rest(strategy)[0].optimizer,
            self._units(strategy) if strategy.pp == 1 and strategy.dp > 1 else (),
            getattr(self.fits(strategy), "accum", 1) if strategy.pp == 1 else 1,
        )

    def _units(self, strategy: Strategy) -> tuple[StepUnit, ...]:
        """Return the pieces in which a rank computes without a pipeline: those of the chain, or the whole model."""
        chain, costs = self.facts.chain, self.facts.costs
        count = len(chain) if chain is not None else 1
        shares = [cost / sum(costs) for cost in costs] if len(costs) == count else [1 / count] * count
        element = {name: one["weight"] for name, one in self.kinds.items()}
        pieces: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
        for weight in self._weights(strategy):
            if weight.trained or strategy.zero == 3:
                size = element[weight.name] * held(weight, strategy, 0, None)
                pieces[weight.blocks[0] if weight.blocks else 0].append((size, weight.outside))
        return tuple(
            StepUnit(share, tuple(size for size, _ in own), sum(size for size, outside in own if outside))
            for share, own in zip(shares, pieces, strict=True)
        )

    def of_all_ranks(self, strategy: Strategy) -> tuple[Term, ...]:
        """Return the traffic of all ranks together in a step; empty if unknown."""
        return terms_of(self._made(strategy, range(strategy.mesh.size)))

    def _made(self, strategy: Strategy, ranks: Iterable[int]) -> list[list[TrafficTerm]]:
        try:
            return self._of(strategy, ranks)
        except NbkitError:  # the model cannot be split, or one of its sizes is not known
            return []

    def _of(self, strategy: Strategy, ranks: Iterable[int]) -> list[list[TrafficTerm]]:
        sizes = {one["weight"] for one in self.kinds.values()}
        arithmetic = self.fits(strategy)
        accumulation = getattr(arithmetic, "accum", 1 if self.config.compute.microbatch_size is None else None)
        if len(sizes) != 1 or accumulation is None or (self.facts.chain is None and strategy.zero == 3):
            return []
        weights, facts, sequence = self._weights(strategy), Facts(), False
        if strategy.mesh.size != strategy.dp:
            facts = replace(self._facts, batch=getattr(arithmetic, "total", None))
            if facts.width is None or facts.batch is None:
                return []
            sequence = strategy.cp == 1 and strategy.tp > 1 and self._partial_of(strategy.tp)[1]
        if strategy.ep > 1:
            if (total := getattr(arithmetic, "total", None)) is None or not self.facts.routed.layers:
                return []
            layers = self.facts.routed.layers
            again = self.options.recompute is True  # a selective recomputation sends nothing
            routed = tuple(Routed(layer.slots, layer.width, layer.given, layer.count, again) for layer in layers)
            facts = replace(facts, batch=total, routed=routed)
        size, cuts = sizes.pop(), self._cuts(strategy)
        each, mesh = Bytes(size, size, max(self.census.state.values(), default=0)), strategy.mesh
        known: dict[tuple[int, ...], list[TrafficTerm]] = {}
        found, plan = [], self._plan(strategy)
        both = exchanges(plan) if plan is not None and plan.owners else ()
        for rank in ranks:
            at = tuple(mesh.index(rank).values())
            if at not in known:
                terms = per_step(
                    weights,
                    facts,
                    strategy,
                    rank,
                    cuts=cuts,
                    each=each,
                    hidden=size,
                    accumulation=accumulation,
                    sequence_parallel=sequence,
                    node_of=self._node_of,
                )
                known[at] = list(terms)
                if strategy.tp > 1:
                    known[at] = _as_issued(terms, strategy, facts, rank, size, accumulation, sequence)
            calls, sent = len(both), sum(each.sent[rank] for each in both)
            whole = TrafficTerm("world", "all_to_all", mesh.size, calls, sent, "whole tensors to owners and back")
            found.append([*known[at], whole] if both else known[at])
        return found

    def _cuts(self, strategy: Strategy) -> Cuts | None:
        chain = self.facts.chain
        if strategy.pp == 1 or chain is None:
            return None
        return place(self.facts.costs or [1.0] * len(chain), strategy)

    def _weights(self, strategy: Strategy) -> list[Weight]:
        chain = self.facts.chain
        units, pieces = (chain.units, chain.parameters) if chain is not None else ((), ())
        whole = self.facts.parts(strategy.tp, 0, self.options.tp_plan)
        partial = self._partial_of(strategy.tp)[0] if strategy.tp > 1 and strategy.cp == 1 else frozenset()
        found, cast, plan = [], self.facts.casts(strategy), self._plan(strategy)
        experts = self.facts.routed.place_of
        places = plan.places if plan is not None else {}
        for name, p in self.skeleton.named_parameters():
            shape, inside = tuple(p.shape), any(name.startswith(f"{unit}.") for unit in units)
            cut = [dim for dim, (here, all_) in enumerate(zip(whole[name].local, shape, strict=True)) if here != all_]
            found.append(
                Weight(
                    name,
                    shape,
                    tp_dim=cut[0] if cut else None,
                    blocks=tuple(i for i, piece in enumerate(pieces) if name in piece),
                    outside=not inside,
                    trained=name in self.trained,
                    summed=("tp",) * (name in partial) + ("cp",) * inside,
                    gathered=cast.dtype.itemsize if cast is not None and name in cast.names else None,
                    experts=experts[name][1:] if name in experts else None,
                    owner=places.get(name),
                )
            )
        return found

    def _partial_of(self, size: int) -> tuple[frozenset[str], bool]:
        """Return (names of parameters whose gradients are partial sums over tp, True with sequence parallelism)."""
        if size not in self._partial:
            module = skeleton_of(self.skeleton)
            plan = self.facts.tensor_plan(size, self.options.tp_plan)
            split = parts_of(module, plan, size, 0, sequence=True)
            self._partial[size] = (
                split.partial,
                any(wrapped_by(part, SequenceParallelBlock) for part in module.modules()),
            )
        return self._partial[size]

    @cached_property
    def _facts(self) -> Facts:
        """Return the facts of a chain of transformer blocks; Facts() for any other model.

        All parameters must be trained, in full precision, and no recomputation may send again.
        """
        plain = self.config.precision is None and self.config.compute.recompute is not True
        alike = len(self.trained) == len(self.kinds) and plain
        return transformer_facts(self.facts, self.options) if alike else Facts()


def transformer_facts(facts: ModelFacts, options: JobOptions) -> Facts:
    """Return the facts of a chain of transformer blocks that the tensor plan splits.

    Each block must have an attention and an MLP. For any other model, return an empty Facts().
    """
    chain, hidden = facts.chain, facts.hidden
    if chain is None or hidden is None or len(chain.blocks) != len(chain.units):
        return Facts()
    plan = facts.tensor_plan(1, options.tp_plan)
    roles = sorted(plan.singles.values())
    in_blocks = [[pair for pair in plan.pairs if pair.owner.startswith(unit)] for unit in chain.units]
    if any(sorted(pair.kind == "mlp" for pair in pairs) != [False, True] for pairs in in_blocks):
        return Facts()
    if len(plan.pairs) != 2 * len(chain.units) or roles not in ([], ["head", "vocab"]):
        return Facts()
    heads = next(pair.heads for pair in plan.pairs if pair.heads is not None)
    table = next((path for path, role in plan.singles.items() if role == "vocab"), None)
    return Facts(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        width=hidden[1],
        sequence=hidden[0],
        vocab=facts.shapes.skeleton.get_submodule(table).num_embeddings if table else None,  # type: ignore[arg-type]
        blocks=len(chain),
    )


def _as_issued(
    terms: Sequence[TrafficTerm],
    strategy: Strategy,
    facts: Facts,
    rank: int,
    size: int,
    accumulation: int,
    sequence: bool,
) -> list[TrafficTerm]:
    """Correct `terms`, which follow the literature, for the first and last layers of nbkit's tensor parallelism.

    Under cp, embedding and head see all positions, and use an all-reduce over tp. Without a vocabulary, positions are
    split before the first block (and all-gathered in the backward pass), and gathered after the last.
    """
    tp, micros, at = strategy.tp, strategy.microbatches or accumulation, strategy.mesh.index(rank)
    start, stop = strategy.rows(facts.batch or 0)[at["dp"]]
    hidden = (stop - start) * (facts.sequence or 0) * (facts.width or 0) * size
    # The loss needs the largest logit first, then both sums at once.
    found = [replace(term, calls=2 * micros) if term.what == "loss" else term for term in terms]
    if not sequence:
        ends = {term.what for term in terms if term.axis == "tp"} & {"embedding", "head"}
        found = [term for term in found if term.axis != "tp" or term.what not in ends]
        found += [TrafficTerm("tp", "all_reduce", tp, micros, hidden, what) for what in sorted(ends)]
    elif facts.vocab is None:
        stages = ranks_of_stages(strategy)
        ends_here = (stages[0] == at["pp"]) + (stages[-1] == at["pp"])
        found.append(TrafficTerm("tp", "all_gather", tp, micros * ends_here, hidden * ends_here, "ends of the blocks"))
    return found


def _foreseen(builder: Builder, kinds: Kinds) -> Kinds:
    """Return `kinds`. Before the first step, add the state that the optimizer will keep."""
    if any(len(one) > 1 for one in kinds.values()):
        return kinds
    with suppress(Exception):  # if the optimizer cannot be tried, its state is known after its first step
        return builder.template.kinds(builder.skeleton)
    return kinds


def _blocks(skeleton: nn.Module, chain: LayerChain | None) -> dict[str, dict[str, int]]:
    """Return the sizes of the parameters by block.

    Parameters in no block are "before" or "after" the chain, or in "model" without a chain.
    """
    names = chain.units if chain is not None else ()
    behind = set(chain.after) if chain is not None else set()
    sizes = {name: p.numel() for name, p in skeleton.named_parameters()}
    home = {name: next((block for block in names if name.startswith(f"{block}.")), "") for name in sizes}
    loose = {
        name: ("after" if name in behind else "before") if names else "model"
        for name, block in home.items()
        if not block
    }
    found: dict[str, dict[str, int]] = {block: {} for block in ("before", *names, "after", "model")}
    for name, size in sizes.items():
        found[home[name] or loose[name]][name] = size
    return {block: inside for block, inside in found.items() if inside}
