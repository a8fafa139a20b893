"""Build every sharded model of a job: make its plan, prove the plan, make process groups, and split the model."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from nbkit.errors import StrategyError, TrainingError
from nbkit.planner.link_speed import WorldLinks
from nbkit.rank.aside import NotAside, aside
from nbkit.rank.comm.agree import agree, all_gather_objects
from nbkit.rank.comm.link_probe import know, link_of
from nbkit.rank.data.batch import Shard
from nbkit.rank.data.first_batches import FirstBatches
from nbkit.rank.device import accelerator
from nbkit.rank.loss.changed_loss import ChangedLoss
from nbkit.rank.loss.reads_model import reading_no_parameter
from nbkit.rank.models.deferred import build_parts, without_memory
from nbkit.rank.models.pretrained import Pretrained, ReadsWeights, WeightlessModel
from nbkit.rank.parallel.check_model import warn_of, warn_of_coupled
from nbkit.rank.parallel.data_parallel.ddp import broadcast_from_first
from nbkit.rank.parallel.device_mesh import forget, groups_made
from nbkit.rank.parallel.fact_finder import FactFinder
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes, needed_facts
from nbkit.rank.parallel.module.copies import build_again, built_again, skeleton_of
from nbkit.rank.parallel.module.fp8 import check_fp8
from nbkit.rank.parallel.parallelize import ShardedSkeleton, cut, parallelize, parallelize_lean
from nbkit.rank.parallel.plan import ParallelPlan, keeps_whole, make_plan, need_rows
from nbkit.rank.parallel.process_groups import Connections, close_unused, connect, groups_exist, meet_groups
from nbkit.rank.parallel.proof.outside_state import OutsideState, outside_kept
from nbkit.rank.parallel.reshard.load_local_shards import fill_state, fill_weights
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.parallel.whole_step import StepProof, prove_step
from nbkit.rank.rng.seeding import build
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.control.rank_sync import compare_ranks, constants_of
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.rank.train.step.optimizer_state import offload, remember
from nbkit.rank.train.step.several_optimizers import Several
from nbkit.rank.train.switch.exchange_cache import ExchangeCache, Kinds
from nbkit.rank.train.switch.model_edits import Changes, follow
from nbkit.schedules import checked_sizes
from nbkit.strategy import Strategy
from nbkit.techniques import class_in

T = TypeVar("T")
Model = nn.Module | Callable[[], nn.Module] | Pretrained
Optimizer = torch.optim.Optimizer | Several | Callable[[nn.Module], torch.optim.Optimizer | Several]


@dataclass(frozen=True)
class Blueprint:
    """The findings of a Builder, which are the same on every rank. A process that joins a training takes them over.

    proven: strategies that the ranks have agreed on. synced: strategies for which every rank has the necessary facts
    about the model. begun: the first step whose batch was examined. A Blueprint can be pickled if the model, the loss
    and the example can.
    """

    config: TrainConfig
    template: OptimizerSpec
    facts: ModelFacts
    options: JobOptions
    proven: frozenset[Strategy]
    synced: frozenset[Strategy]
    begun: int | None
    link: WorldLinks | None


class Builder:
    """Builds the sharded models of one job: `first` for the start, `build` for every later strategy.

    link: the links between the ranks; None in a world of one.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        config: TrainConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        asked: Sequence[Strategy] = (),
    ) -> None:
        """Build the model and examine it. Collective. asked: strategies that the job will use, as far as known.

        Raises TrainingError if a rank has built another model than rank 0.
        """
        self.rank, self.world_size, self.device, self.config = rank, world_size, device, config
        self.offload = config.compute.offload is not None
        if self.offload and not accelerator().holds(device):
            warnings.warn("offload= has no effect on CPU ranks: their state is in host memory already", stacklevel=4)
        self.shells: list[WeightlessModel] = []
        if isinstance(model, Pretrained):
            where, build_it = str(model.directory), model.build
            agree(
                lambda: self.shells.append(build_it(seed=config.seed, device=device)),
                what=f"The model in {where!r} could not be built.",
                hint="a directory that every rank sees, and that model.save_pretrained wrote",
            )
            self.module: nn.Module = self.shells[0].module
        else:
            self.module = self._built(model, asked)
            compare_ranks(
                constants_of(self.module),
                world_size=world_size,
                device=device,
                what="numbers in attributes of the model, which nbkit does not send",
                hint="register_buffer; or model=lambda: ..., which is built from one seed on every rank",
            )
        # Before the skeleton: the optimizer's factory may read weights, and may freeze some of them.
        self.template = self._template(optimizer, must_not_read=isinstance(model, Pretrained))
        OutsideState(self.module, config.loss)  # from now on the iterators that it finds can be copied and restored
        self.skeleton = self._skeleton(model)
        self.options = JobOptions(
            tp_plan=config.hints.tp_plan,
            recompute=config.compute.recompute,
            fp8=config.compute.fp8,
            loss_chunks=config.compute.loss_chunks,
            cut=config.compute.microbatch_size is not None,
            compile=config.compute.compile,
            adaptive=self.template.is_adaptive(),
            own_forward=config.own_loss,
            whole=self.template.whole("rows"),
            whole_in_tp=self.template.whole("columns"),
        )
        self.finder = self._finder(ModelFacts(ModelShapes(self.skeleton)))
        wanted = frozenset[str]().union(*map(needed_facts, asked))
        again = None if isinstance(model, nn.Module | Pretrained) else without_memory(model) if self.shells else model
        self.finder.begin(again, wanted)
        self.finder.synced = {strategy.composed for strategy in asked}
        self._warned: set[Strategy] = set()
        self._agreed: set[Strategy] = set()
        self.link = link_of(device)
        self._begin()

    @classmethod
    def joining(
        cls,
        blueprint: Blueprint,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        module: nn.Module | None = None,
    ) -> Builder:
        """Return the Builder of a process that joins a running training. Nothing is examined again.

        Collective if the number of ranks has changed, because the links are then measured again. Otherwise it sends
        nothing. module: the module that the user holds, if any.
        """
        self = cls.__new__(cls)
        self.rank, self.world_size, self.device, self.config = rank, world_size, device, blueprint.config
        self.offload, self.shells = blueprint.config.compute.offload is not None, []
        self.template, self.options = blueprint.template, blueprint.options
        self.skeleton = blueprint.facts.shapes.skeleton
        self.module = skeleton_of(self.skeleton) if module is None else module
        self.finder = self._finder(blueprint.facts)
        self.finder.synced |= blueprint.synced
        self._warned, self._agreed = set(blueprint.proven), set(blueprint.proven)
        before = blueprint.link.ranks if blueprint.link is not None else 1
        self.link = know(blueprint.link) if before == world_size else link_of(device)
        self._begin()
        self._first_batches.begun = blueprint.begun
        return self

    def _built(self, model: nn.Module | Callable[[], nn.Module], asked: Sequence[Strategy]) -> nn.Module:
        """Return the module to train. If an asked strategy splits it, a callable builds it without large weights."""
        seed, device, world_size, weightless = self.config.seed, self.device, self.world_size, None
        if isinstance(model, nn.Module) or all(map(keeps_whole, asked)):
            module = build(model, seed=seed, device=device)
        else:
            module, weightless = build_parts(model, seed=seed, device=device, world_size=world_size)
        if weightless is not None:
            self.shells.append(weightless)
        equal = weightless.names if weightless is not None else ()
        broadcast_from_first(module, world_size=world_size, without=equal)
        return module

    def _template(self, optimizer: Optimizer, *, must_not_read: bool) -> OptimizerSpec:
        if not self.shells or not callable(optimizer) or isinstance(optimizer, type):
            return OptimizerSpec(optimizer, module=self.module)
        try:
            return OptimizerSpec(partial(self.shells[0].made_unread, optimizer), module=self.module)
        except ReadsWeights:
            if must_not_read:
                raise
        # The factory reads weights, but the model was built without them.
        self.shells.pop().make_whole()
        return OptimizerSpec(optimizer, module=self.module)

    def check_fp8(self) -> None:
        """Raise TrainingError on every rank if fp8=True was asked for, and a rank cannot do it. Collective."""
        if self.options.fp8:
            what = "A rank cannot compute in fp8."
            agree(lambda: check_fp8(self.skeleton, self.device), what=what, hint="compute=nbkit.Compute(fp8=False)")

    @property
    def blueprint(self) -> Blueprint:
        """Return the findings for a process that joins later."""
        # Without `sample`: the data has been examined already.
        seen = replace(self.config, sample=None), self.template, self.facts, self.options
        known = frozenset(self._agreed), frozenset(self.finder.synced)
        return Blueprint(*seen, *known, self._first_batches.begun, self.link)

    @property
    def facts(self) -> ModelFacts:
        """Return the facts about the model that are known now."""
        return self.finder.facts

    def _finder(self, facts: ModelFacts) -> FactFinder:
        here: Any = {"rank": self.rank, "world_size": self.world_size, "device": self.device}
        return FactFinder(self.module, facts, self.config.model_example, aside=self.aside, **here)

    def _begin(self) -> None:
        self.names = tuple(name for name, _ in self.skeleton.named_parameters())
        self.exchanges = ExchangeCache(self.skeleton, self.rank)
        self._plans: dict[Strategy, ParallelPlan] = {}
        self._connected: dict[ParallelPlan, Connections] = {}
        self._connecting = threading.RLock()
        self.step_proofs: dict[Strategy, StepProof] = {}
        self._classes: dict[Strategy, type] = {}  # the user's class with which a strategy was proven
        self.computing: weakref.ref[ShardedModel] | None = None  # the sharded model that the job uses now
        self._ready: ShardedSkeleton | None = None  # prepared by `make_ready` for one strategy
        self._beside: tuple[Strategy | None, float] = None, 0.0
        self._changes = 0  # number of changes of the skeleton
        # Not in a step: after a switch, it must still know what the loss read before.
        self.changed_loss = ChangedLoss(self.config.loss, self.config.inputs, self.device)
        self._first_batches = FirstBatches(
            self.config.loss,
            self.config.inputs,
            parted=self.config.compute.microbatch_size is not None,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
        )

    def plan(self, strategy: Strategy) -> ParallelPlan:
        """Return the plan of `strategy`, made from the facts known now. From any thread. See `make_plan`."""
        found, facts, options = self._plans.get(strategy), self.facts, self.options
        if found is None or found.facts is not facts or found.options is not options:
            node_of = self.link.node_of if self.link is not None else ()
            found = self._plans[strategy] = make_plan(strategy, facts, options, node_of)
        return found

    def first(self, strategy: Strategy) -> tuple[ShardedModel, torch.optim.Optimizer]:
        """Return the sharded model that a job starts with, and its optimizer."""
        connections = self.connect(strategy, alike=self._alike(strategy))
        if self.shells:
            sharded_model = parallelize_lean(self.plan(strategy), connections, device=self.device)
            optimizer = self._optimizer(sharded_model)
            agree(
                lambda: self.shells[0].fill(sharded_model),
                what="The model's weights could not be read or made.",
                hint="the whole directory on every rank; or model=MyModel(...), which every rank builds whole",
            )
            sharded_model.data.refresh()
            self.shells.clear()
        else:
            sharded_model, optimizer = self.build(self.plan(strategy), connections, own=self.module)
            fill_weights(sharded_model, self.module)
        fill_state(sharded_model, self.template.state, partial(remember, optimizer))
        for p in sharded_model.module.parameters():
            p.grad = None  # drop gradients of an earlier backward pass of the user
        return sharded_model, optimizer

    def build(
        self,
        plan: ParallelPlan,
        connections: Connections,
        *,
        own: nn.Module | None = None,
        like: torch.optim.Optimizer | None = None,
    ) -> tuple[ShardedModel, torch.optim.Optimizer]:
        """Return a sharded model whose weights are not filled yet, and an optimizer without state. Sends nothing.

        own: the whole model, for a strategy that splits nothing. like: copy the settings of this optimizer.
        """
        ready, self._ready = self._ready, None
        if ready is not None and ready.plan == plan and ready.connections is connections and own is None:
            sharded_model = ready.build(self.device)
        else:
            sharded_model = parallelize(plan, connections, device=self.device, own=own)
        return sharded_model, self._optimizer(sharded_model, like)

    def _optimizer(
        self, sharded_model: ShardedModel, like: torch.optim.Optimizer | None = None
    ) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.template.build(sharded_model.held, like)
        if self.offload:
            offload(optimizer)
        return optimizer

    def _alike(self, strategy: Strategy) -> bool:
        # No check of `strategy` here: `connect` refuses it on every rank with the same error.
        own = 2 * groups_made()
        stamps = all_gather_objects(own, world_size=self.world_size, device=self.device)
        return len(set(stamps)) == 1

    def groups_made(self, plan: ParallelPlan) -> int:
        """Return 2 * (number of groups made so far) + (1 if the groups of `plan` are among them, else 0).

        The result is equal on ranks that have made the same groups.
        """
        return 2 * groups_made() + (plan in self._connected)

    def connect(self, strategy: Strategy, *, alike: bool) -> Connections:
        """Return the process groups of `strategy`. Collective. The first call for a strategy gives its warnings.

        alike: all ranks have made the same groups so far. If not, all groups are made again. Raises StrategyError or
        TrainingError if the strategy cannot split the model. All ranks raise the same, before any group is made.
        """
        if not alike:
            forget(self.device)
            self._connected.clear()
        self.agree_on(strategy)
        connections = self._connections(self.plan(strategy))
        # Also for groups of an earlier call: the world may have been formed again since, and their ranks must meet.
        meet_groups(connections, self.device)
        return connections

    def _connections(self, plan: ParallelPlan) -> Connections:
        with self._connecting:
            if plan not in self._connected:
                self._connected[plan] = connect(plan, self.rank)
            return self._connected[plan]

    def close_groups(self, *, kept: Collection[Strategy]) -> None:
        """Close the process groups that no strategy of `kept` uses, if they hold memory of a device.

        Collective, between two steps.
        """
        if accelerator().holds(self.device) and self.world_size > 1:
            with self._connecting:
                self._connected = {one: made for one, made in self._connected.items() if one.strategy in kept}
                if self._ready is not None and self._ready.plan.strategy not in kept:
                    self._ready = None
                close_unused(self.device)

    def agree_on(self, strategy: Strategy) -> None:
        """Prove `strategy` before its first use. All ranks get the same result or the same error. Collective."""
        self._compare_schedules(strategy)
        self.finder.sync([strategy])
        if strategy not in self._warned:
            self.template.check(strategy)
            self._warned.add(strategy)
            warn_of(self._unchecked(strategy))
        # The order of the ranks does not change a step. A strategy that differs only in it needs no new proof.
        composed = strategy.composed
        # The user can replace a class of their own at any time. So a strategy with such a class is proven at each use.
        if composed not in self._agreed or "mine" in composed.settings:
            self.plan(strategy)
            proofs = [self._step_proof(strategy) if self.rank == 0 else StepProof()]
            if self.world_size > 1:
                dist.broadcast_object_list(proofs, src=0, device=self.device)
            if (refusal := proofs[0].refusal) is not None:
                raise refusal
            if (finding := proofs[0].finding(strategy)) is not None:
                warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=4)
            self._agreed.add(composed)

    def _compare_schedules(self, strategy: Strategy) -> None:
        """Raise TrainingError on every rank if ranks have registered different schedules under the same name.

        Collective for a user's schedule. The schedules are compared at each use, because a later cell may register
        another one.
        """
        if not (name := strategy.schedule):
            return
        if sizes := checked_sizes(name, strategy.pp, strategy.microbatches or 1):
            compare_ranks(
                {
                    f"{name}: rank {rank} of {size.ranks}, {size.microbatches} micro-batches": " ".join(map(str, ops))
                    for size in sizes
                    for rank, ops in enumerate(size.ops)
                },
                world_size=self.world_size,
                device=self.device,
                what="schedules",
                hint=f"nbkit.schedules.register({name!r}, ...) again, on all ranks: %%distributed",
            )

    def _step_proof(self, strategy: Strategy, *, beside: bool = False) -> StepProof:
        """Return the result of comparing a step under `strategy` with a step in one process.

        Sends nothing and draws no random numbers. beside: run it while the model trains, from any thread. Raises
        NotAside where that is impossible.
        """
        strategy = strategy.composed
        if (own := class_in(strategy)) is not None and own is not self._classes.get(strategy):
            self._classes[strategy] = own
            self.step_proofs.pop(strategy, None)
        if strategy not in self.step_proofs:
            config = self.config
            prove = partial(
                prove_step,
                self.plan(strategy),
                config.hints.example,
                loss=reading_no_parameter(config.loss, strategy, self.module),
                inputs=config.inputs,
                optimizer=self.template.on_cpu,
                microbatch_size=config.compute.microbatch_size,
                short=self.finder.short,
                many=self.finder.many,
                reference=self.finder.reference,
            )
            if beside:
                self.step_proofs[strategy] = self.aside(prove)
            else:
                with outside_kept(self.module, config.loss):
                    self.step_proofs[strategy] = prove()
        return self.step_proofs[strategy]

    def aside(self, work: Callable[[], T]) -> T:
        """Call `work`, which runs user code, while the model trains. Return its result. See nbkit.rank.aside."""
        return aside(work, device=self.device, live=self._live)

    def _live(self) -> Iterable[torch.Tensor]:
        """Yield all tensors that the training may change."""
        sharded_model = self.computing() if self.computing is not None else None
        if sharded_model is not None:
            yield from sharded_model.held.values()
        yield from self.module.parameters()
        yield from self.module.buffers()

    def check_moves(self, old: Strategy, new: Strategy) -> None:
        """Raise StrategyError if a switch would lose state of the model. Also calls OptimizerSpec.check_moves."""
        if (outside := self.facts.outside) is not None and outside.keyed:
            raise StrategyError(
                f"A switch to {new} would lose {outside.keyed[0]!r}, which the model sets in one pass and reads in the "
                "next.",
                numbers="the model object or one of its tensors keeps it, and a switch replaces them",
                hint="self.calls = ..., an attribute of the model",
            )
        self.template.check_moves(old, new)

    def follow(self, everyone: Sequence[Changes]) -> None:
        """Build all later sharded models with the changes that users made to the model on any rank."""
        if follow(everyone, self.skeleton):
            self._ready, self._changes = None, self._changes + 1

    def make_ready(self, old: ParallelPlan, new: ParallelPlan, kinds: Kinds, *, limit: int) -> None:
        """Prepare a switch from `old` to `new`: the exchange, the proof and the module. Sends nothing. From any thread.

        limit: bytes of a round of the exchange. If ranks then agree on another one, the switch cuts the rounds again.
        The module is split only if no process group is missing. Raises as `ExchangeCache.exchange` and `cut` do.
        """
        began = time.perf_counter()
        self.exchanges.exchange(old, new, kinds, limit=limit)
        if self.rank == 0:
            with suppress(NotAside):  # then `connect` makes the proof, between two steps
                self._step_proof(new.strategy, beside=True)  # `connect` sends it to all ranks
        self._beside = new.strategy, time.perf_counter() - began
        with self._connecting:
            there = new in self._connected or groups_exist(new)
            if there:
                self._connections(new)  # marks the groups as used, so that they are not closed
        if there:
            self.create_groups(new)

    def connected(self, plan: ParallelPlan) -> bool:
        """Return True if this builder has made or found the groups of `plan`."""
        return plan in self._connected

    def create_groups(self, new: ParallelPlan) -> None:
        """Make the missing groups, and split the module with them. From any thread. Collective if a group is missing.

        Raises as `connect` and `cut` do.
        """
        began, changes = time.perf_counter(), self._changes
        ready = cut(new, self._connections(new), device=self.device)
        if changes == self._changes:
            self._ready = ready
        self._beside = new.strategy, self._beside[1] + time.perf_counter() - began

    def beside(self, new: Strategy) -> float:
        """Return the seconds that `make_ready` and `create_groups` took for a switch to `new`, or 0."""
        (made, seconds), self._beside = self._beside, (None, 0.0)
        return seconds if made == new else 0.0

    def look_at_first(self, sharded_model: ShardedModel, shard: Shard, step: int) -> None:
        """Examine the first batches for coupled rows, whose outputs depend on each other. Collective for these batches.

        If rows are coupled, strategies that split the rows of a batch are refused or give a warning from then on.
        Raises StrategyError, on every rank, if the strategy in force splits them.
        """
        if (found := self._first_batches.look(sharded_model, shard, step)) is None:
            return
        # None means that this batch does not show it. Then the earlier result stays valid.
        known = {name: value for name, value in vars(found).items() if value is not None}
        if self.facts.collectives:
            known.pop("coupled", None)  # the proof of a whole step has shown it
        self.finder.set_facts(**known)
        need_rows(sharded_model.strategy, self.facts, self.options)
        for finding in warn_of_coupled(self._unchecked(sharded_model.strategy)):
            warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=2)

    def took(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the job now uses `optimizer`."""
        self.template.follow(optimizer)

    def _skeleton(self, model: Model) -> nn.Module:
        """Return a copy of the model without weights. Raises TrainingError if it can be neither copied nor rebuilt."""
        try:
            return skeleton_of(self.module)
        except Exception as error:
            if isinstance(model, nn.Module | Pretrained):
                raise TrainingError(
                    "nbkit cannot copy the model, and every strategy needs a copy.",
                    numbers=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                    hint="model=lambda: MyModule(...), which builds the model again for each strategy",
                ) from error
            skeleton = built_again(model, self.module)
            build_again(skeleton, partial(built_again, model))
            return skeleton

    def may_cut(self) -> None:
        """Prepare a single process to split batches into micro-batches. Examines the rows now and in the next batches.

        Does nothing with several ranks, or if batches are split already.
        """
        if self.world_size == 1 and not self.options.cut:
            self._first_batches.part()
            self.finder.examine_rows()

    def choose(self, **options: Any) -> None:
        """Change attributes of JobOptions. They apply to all sharded models that are made from now on."""
        self.options = replace(self.options, **options)
        self._ready, self._changes = None, self._changes + 1

    def _unchecked(self, strategy: Strategy) -> ParallelPlan:
        """Return the plan of `strategy` even if it would be refused. Only for warnings about it."""
        return ParallelPlan(strategy, self.facts, self.options)
