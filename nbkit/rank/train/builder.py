"""Builds every sharded model of a job, from shapes, blocks, the groups of the optimizer and the options."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.link_probe import know, link_of
from nbkit.rank.comm.thread_group import Alone
from nbkit.rank.data.batch import Shard, call, on_device
from nbkit.rank.data.first_batches import FirstBatches
from nbkit.rank.data.sample_rows import Sample, undrawn
from nbkit.rank.device import accelerator
from nbkit.rank.loss.loss_check import examine, split_by_values
from nbkit.rank.loss.reads_model import reading_no_parameter
from nbkit.rank.models.pretrained import Pretrained, WeightlessModel
from nbkit.rank.parallel.check_model import warn_of, warn_of_coupled
from nbkit.rank.parallel.data_parallel.ddp import broadcast_from_first
from nbkit.rank.parallel.device_mesh import forget, groups_made
from nbkit.rank.parallel.model_facts import ModelRuns, facts_for, find_facts, find_later, lacking, told
from nbkit.rank.parallel.module.block_discovery import experts_in
from nbkit.rank.parallel.module.copies import build_again, built_again, hooked_gradient, skeleton_of
from nbkit.rank.parallel.options import Options, need_rows
from nbkit.rank.parallel.parallelize import ShardedSkeleton, cut, parallelize
from nbkit.rank.parallel.process_groups import Connections, close_unused, connect, meet_groups, served
from nbkit.rank.parallel.proof.outside_state import OutsideState, outside_kept, put_back_before
from nbkit.rank.parallel.proof.own_parts import look_at_copies
from nbkit.rank.parallel.proof.short_example import FirstRuns, first_runs
from nbkit.rank.parallel.reshard.load_local_shards import fill_state, fill_weights
from nbkit.rank.parallel.shard_layouts import ShardLayouts
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.parallel.whole_step import WIDE, Reference, StepProof, prove_step
from nbkit.rank.rng.seeding import build
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.control.rank_agreement import compare_ranks, constants_of
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.rank.train.step.optimizer_state import offload, remember
from nbkit.rank.train.switch.model_edits import Changes, follow
from nbkit.rank.train.switch.plan_cache import Kinds, PlanCache
from nbkit.strategy import Strategy

T = TypeVar("T")
Model = nn.Module | Callable[[], nn.Module] | Pretrained
Optimizer = torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Blueprint:
    """The findings of a Builder, the same on every rank. A process that joins a training takes them over.

    proven: strategies that the ranks have agreed on. told: strategies for which every rank has the facts about the
    model that they need. begun: the first step whose batch was looked at. Picklable if the model, the loss and the
    example are.
    """

    config: TrainConfig
    skeleton: nn.Module
    template: OptimizerSpec
    options: Options
    proven: frozenset[Strategy]
    told: frozenset[Strategy]
    begun: int | None
    link: WorldLinks | None


class Builder:
    """Builds the sharded models of one job: `first` for the start, `build` for every later strategy.

    link: the links between the ranks; None in a world of one.
    """

    _short: Any = None  # a shorter example, where few positions show as much
    _many: Any = None  # rows of the data, more than the example has
    reference: Reference | None = None  # a second model from the user's callable, which proofs run as one process

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
        """Build the model and look at it. Collective. asked: strategies that are known to come.

        Raises TrainingError when a rank built another model than rank 0.
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
                hint="a directory that every rank sees, as model.save_pretrained writes it",
            )
            self.module: nn.Module = self.shells[0].module
        else:
            self.module = build(model, seed=config.seed, device=device)
            broadcast_from_first(self.module, world_size=world_size)
            compare_ranks(
                constants_of(self.module),
                world_size=world_size,
                device=device,
                what="numbers in attributes of the model, which nobody sends",
                hint="register_buffer; or model=lambda: ..., which is built from one seed on every rank",
            )
        # Before the skeleton: the factory sees weights, and may freeze some of them.
        if self.shells and not isinstance(optimizer, torch.optim.Optimizer | type):
            optimizer = partial(self.shells[0].made_unread, optimizer)
        self.template = OptimizerSpec(optimizer, module=self.module)
        OutsideState(self.module, config.loss)  # iterators that it finds can be copied and put back from now on
        self.skeleton = self._skeleton(model)
        self.reference = self._built_again(model)
        self.options = self._look(config, asked, model)
        self._warned: set[Strategy] = set()
        self._agreed: set[Strategy] = set()
        self._told = {strategy.composed for strategy in asked}
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
        """Return the Builder of a process that joins a running training. Examines nothing again and sends nothing.

        Collective if the world has another number of ranks than before, since the links are then measured.
        module: the module that the user holds, if any.
        """
        self = cls.__new__(cls)
        self.rank, self.world_size, self.device, self.config = rank, world_size, device, blueprint.config
        self.offload, self.shells = blueprint.config.compute.offload is not None, []
        self.skeleton, self.template, self.options = blueprint.skeleton, blueprint.template, blueprint.options
        self.module = skeleton_of(self.skeleton) if module is None else module
        self._warned, self._agreed, self._told = set(blueprint.proven), set(blueprint.proven), set(blueprint.told)
        before = blueprint.link.ranks if blueprint.link is not None else 1
        self.link = know(blueprint.link) if before == world_size else link_of(device)
        self._begin()
        self._first_batches.begun = blueprint.begun
        return self

    @property
    def blueprint(self) -> Blueprint:
        """Return what a process that joins later takes over."""
        # Without `sample`: the data was looked at already.
        seen = replace(self.config, sample=None), self.skeleton, self.template, self.options
        known = frozenset(self._agreed), frozenset(self._told)
        return Blueprint(*seen, *known, self._first_batches.begun, self.link)

    def _begin(self) -> None:
        self.names = tuple(name for name, _ in self.skeleton.named_parameters())
        self.shard_layouts = ShardLayouts(self.skeleton, self.options)
        self._node_of = self.link.node_of if self.link is not None else ()
        self.plans = PlanCache(self.shard_layouts, self.rank, self._node_of)
        self._connected: dict[Strategy, Connections] = {}
        self._connecting = threading.RLock()
        self.step_proofs: dict[Strategy, StepProof] = {}
        self.computing: weakref.ref[ShardedModel] | None = None  # the sharded model that the job uses now
        self._ready: ShardedSkeleton | None = None  # prepared for the next sharded model, if the strategy is the same
        self._beside: tuple[Strategy | None, float] = None, 0.0
        self._changes = 0  # of the skeleton
        self._looking, self._knowing = threading.Lock(), threading.Lock()
        self._first_batches = FirstBatches(
            self.config.loss,
            self.config.inputs,
            parted=self.config.compute.microbatch_size is not None,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
        )

    def first(self, strategy: Strategy) -> tuple[ShardedModel, torch.optim.Optimizer]:
        """Return the sharded model that a job starts with, and its optimizer."""
        own = None if self.shells else self.module
        sharded_model, optimizer = self.build(strategy, self.connect(strategy, alike=self._alike(strategy)), own=own)
        if self.shells:
            agree(lambda: self.shells[0].fill(sharded_model), what="The model's weights could not be read.")
            sharded_model.data.refresh()
            self.shells.clear()
        else:
            fill_weights(sharded_model, self.module)
        fill_state(sharded_model, self.template.state, partial(remember, optimizer))
        for p in sharded_model.module.parameters():
            p.grad = None  # left by a backward pass that the user made before
        return sharded_model, optimizer

    def build(
        self,
        strategy: Strategy,
        connections: Connections,
        *,
        own: nn.Module | None = None,
        like: torch.optim.Optimizer | None = None,
    ) -> tuple[ShardedModel, torch.optim.Optimizer]:
        """Return a sharded model whose weights are still to be filled, and an optimizer without state. Sends nothing.

        own: the whole model, for a strategy that splits nothing. like: the optimizer whose settings are taken.
        """
        ready, self._ready = self._ready, None
        if ready is not None and ready.connections is connections and own is None:
            sharded_model = ready.build(self.device)
        else:
            sharded_model = parallelize(
                self.skeleton, strategy, connections, options=self.options, device=self.device, own=own
            )
        optimizer = self.template.build(sharded_model.held, like)
        if self.offload:
            offload(optimizer)
        return sharded_model, optimizer

    def _alike(self, strategy: Strategy) -> bool:
        own = self.groups_made(strategy)
        stamps = all_gather_objects(own, world_size=self.world_size, device=self.device)
        return len(set(stamps)) == 1

    def groups_made(self, strategy: Strategy) -> int:
        """Return a number that counts the groups made so far, and tells whether those of `strategy` are among them.

        It is equal on ranks that have made the same groups.
        """
        return 2 * groups_made() + (strategy in self._connected)

    def connect(self, strategy: Strategy, *, alike: bool) -> Connections:
        """Return the groups of `strategy`. Collective. The first call for a strategy gives its warnings.

        alike: all ranks have made the same groups so far; otherwise all groups are made anew. Raises StrategyError or
        TrainingError, on every rank alike and before any group is made, for a model that the strategy cannot split.
        """
        if not alike:
            forget(self.device)
            self._connected.clear()
        self.agree_on(strategy)
        connections = self._connections(strategy)
        # Groups from an earlier call too: in a new generation of the world their ranks have not met.
        meet_groups(connections, self.device)
        return connections

    def _connections(self, strategy: Strategy) -> Connections:
        with self._connecting:
            if strategy not in self._connected:
                self._connected[strategy] = connect(strategy, self.shard_layouts.of(strategy), self.rank, self._node_of)
            return self._connected[strategy]

    def close_groups(self, *, kept: Collection[Strategy]) -> None:
        """Close the groups that no strategy of `kept` uses, if they hold memory of a device.

        Collective, between two steps.
        """
        if accelerator().holds(self.device) and self.world_size > 1:
            with self._connecting:
                self._connected = {one: made for one, made in self._connected.items() if one in kept}
                if self._ready is not None and self._ready.strategy not in kept:
                    self._ready = None
                close_unused(self.device)

    def agree_on(self, strategy: Strategy) -> None:
        """Prove `strategy` before its first use. All ranks get the same result or the same error. Collective."""
        self.learn([strategy])
        if strategy not in self._warned:
            self.template.check(strategy)
            self._warned.add(strategy)
            warn_of(self.skeleton, strategy, self.options)
        # The places of the ranks do not change a step. So a strategy that differs only in them needs no new proof.
        composed = strategy.composed
        if composed not in self._agreed:
            self.shard_layouts.of(strategy)
            proofs = [self._step_proof(strategy) if self.rank == 0 else StepProof()]
            if self.world_size > 1:
                dist.broadcast_object_list(proofs, src=0, device=self.device)
            if (refusal := proofs[0].refusal) is not None:
                raise refusal
            if (finding := proofs[0].finding(strategy)) is not None:
                warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=4)
            self._agreed.add(composed)

    def _step_proof(self, strategy: Strategy, *, beside: bool = False) -> StepProof:
        """Return the comparison of a whole step under `strategy` with one process. Sends nothing and draws nothing.

        beside: run it while the model trains, from any thread. Raises NotAside where that is impossible.
        """
        strategy = strategy.composed
        if strategy not in self.step_proofs:
            config = self.config
            prove = partial(
                prove_step,
                self.skeleton,
                strategy,
                self.options,
                config.hints.example,
                loss=reading_no_parameter(config.loss, strategy, self.module),
                inputs=config.inputs,
                optimizer=self.template.on_cpu,
                microbatch_size=config.compute.microbatch_size,
                short=self._short,
                many=self._many,
                reference=self.reference,
            )
            if beside:
                self.step_proofs[strategy] = self.aside(prove)
            else:
                with outside_kept(self.module, config.loss):
                    self.step_proofs[strategy] = prove()
        return self.step_proofs[strategy]

    def aside(self, work: Callable[[], T]) -> T:
        """Run `work`, which calls user code, while the model trains, and return its result. See nbkit.rank.aside."""
        return aside(work, device=self.device, live=self._live)

    def _live(self) -> Iterable[torch.Tensor]:
        """Yield the tensors that train."""
        sharded_model = self.computing() if self.computing is not None else None
        if sharded_model is not None:
            yield from sharded_model.held.values()
        yield from self.module.parameters()
        yield from self.module.buffers()

    def check_moves(self, old: Strategy, new: Strategy) -> None:
        """Raise StrategyError if a switch would lose state that the model keeps. See OptimizerSpec.check_moves too."""
        if (outside := self.options.outside) is not None and outside.keyed:
            raise StrategyError(
                f"A switch to {new} would lose {outside.keyed[0]!r}, which the model sets in one pass and reads in the "
                "next.",
                numbers="it is kept by the model object or one of its tensors, in whose place a switch puts others",
                hint="self.calls = ..., an attribute of the model",
            )
        self.template.check_moves(old, new)

    def follow(self, everyone: Sequence[Changes]) -> None:
        """Build all later sharded models with the changes that the ranks made to the model."""
        if follow(everyone, self.skeleton):
            self._ready, self._changes = None, self._changes + 1

    def make_ready(self, old: Strategy, new: Strategy, kinds: Kinds) -> None:
        """Prepare what a switch from `old` to `new` takes from this builder. Sends nothing; from any thread.

        The module is cut only if no process group is missing. Raises as `plans.exchange` and `cut` do.
        """
        began = time.perf_counter()
        self.plans.exchange(old, new, kinds)
        if self.rank == 0:
            with suppress(NotAside):  # otherwise the proof is made between two steps
                self._step_proof(new, beside=True)  # `connect` sends it to all ranks
        self._beside = new, time.perf_counter() - began
        with self._connecting:
            there = new in self._connected or served(new, self.shard_layouts.of(new), self._node_of)
            if there:
                self._connections(new)  # marks them as in use, so that nobody closes them
        if there:
            self.create_groups(new)

    def connected(self, strategy: Strategy) -> bool:
        """Return True if the groups of `strategy` exist and this builder knows them."""
        return strategy in self._connected

    def create_groups(self, new: Strategy) -> None:
        """Make the groups that are missing, and cut the module with them. From any thread; collective if one is made.

        Raises as `connect` and `cut` do.
        """
        began, changes = time.perf_counter(), self._changes
        ready = cut(self.skeleton, new, self._connections(new), options=self.options, device=self.device)
        if changes == self._changes:
            self._ready = ready
        self._beside = new, self._beside[1] + time.perf_counter() - began

    def beside(self, new: Strategy) -> float:
        """Return the seconds that `make_ready` took for this switch, or 0 if it was not called."""
        (made, seconds), self._beside = self._beside, (None, 0.0)
        return seconds if made == new else 0.0

    def look_at_first(self, sharded_model: ShardedModel, shard: Shard, step: int) -> None:
        """Examine the batch of `step`, if it is one of the first, for coupled rows. Collective for those batches.

        If rows are coupled, strategies that part rows are refused or warned of from then on. Raises StrategyError, on
        every rank alike, if the strategy in force parts them.
        """
        if (found := self._first_batches.look(sharded_model, shard, step)) is None:
            return
        # Where this look cannot tell, the result of an earlier one still holds.
        known = {name: value for name, value in vars(found).items() if value is not None}
        if self.options.collectives:
            known.pop("coupled", None)  # a whole step has shown it
        self._know(**known)
        need_rows(self.options, sharded_model.strategy)
        for finding in warn_of_coupled(self.options, sharded_model.strategy):
            warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=2)

    def took(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the job now updates with `optimizer`."""
        self.template.follow(optimizer)

    def _skeleton(self, model: Model) -> nn.Module:
        """Return the shapes of the model. Raises TrainingError where it can neither be copied nor built again."""
        try:
            return skeleton_of(self.module)
        except Exception as error:
            if isinstance(model, nn.Module | Pretrained):
                raise TrainingError(
                    "The model cannot be copied, as every strategy does.",
                    numbers=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                    hint="model=lambda: MyModule(...), which builds it again for each",
                ) from error
            skeleton = built_again(model, self.module)
            build_again(skeleton, partial(built_again, model))
            return skeleton

    def _built_again(self, model: Model) -> Reference | None:
        """Return a second model from the same callable, or None if the callable cannot give one.

        It is built on every rank, as the first one was. `_copies_seen` checks that the first still computes as before.
        """
        few = sum(p.numel() for p in self.skeleton.parameters()) <= WIDE
        example = self.config.hints.example
        if isinstance(model, nn.Module | Pretrained) or example is None or self.world_size == 1 or not few:
            return None
        # A model may register itself where the loss looks for it. That must stay the first model.
        with suppress(Exception), outside_kept(self.module, self.config.loss):
            return Reference(built_again(model, self.skeleton, first=self.module))
        return None

    def _look(self, config: TrainConfig, asked: Sequence[Strategy], model: Model) -> Options:
        """Return the options, completed by running the model on the example: its rows, and the facts that `asked` need.

        Rank 0 does this while the others wait. So they do not disturb what it times.
        """
        options = Options(
            tp_plan=config.hints.tp_plan,
            recompute=config.compute.recompute,
            experts=experts_in(self.skeleton),
            hooked=hooked_gradient(self.module),
            cut=config.compute.microbatch_size is not None,
            compile=config.compute.compile,
            adaptive=self.template.is_adaptive(),
        )
        if config.hints.example is None:
            return options
        refused: TrainingError | None = None
        if self.rank == 0:
            options = replace(options, looked=frozenset[str]())
            with stand_in(Alone()) as here, outside_kept(self.module, config.loss) as outside:
                with suppress(Exception):  # an error of the model is reported in full when it trains
                    options = self._seen(config, options)
                outside.put_back()
                try:
                    options = self._copies_seen(options)
                except TrainingError as error:
                    refused = error if self.world_size > 1 else None
                except Exception:
                    pass
                if wanted := lacking(options, asked):
                    self.options = options
                    found = find_facts(self.module, self._runs(self.module), options, wanted)
                    options = replace(options, **found)
            if here.heard:
                # Rows that are coupled in one process need not be over ranks that gather them. A whole step tells.
                options = replace(options, collectives=here.heard[0], coupled=None)
        if self.world_size > 1:
            sent: list[Any] = [options, refused]
            dist.broadcast_object_list(sent, src=0, device=self.device)
            options, refused = sent
        if refused is not None:
            raise refused
        if not options.again:
            self.reference = None
        if options.rebuilt:
            build_again(self.skeleton, partial(built_again, model))  # type: ignore[arg-type]
        return options

    def _copies_seen(self, options: Options) -> Options:
        """Return `options`, completed by whether copies of the model, with parts of their own, compute as it does."""

        states: dict[int, OutsideState] = {}  # the first one holds what all of them share

        def put_back() -> None:
            for state in states.values():
                state.put_back()

        def run(module: nn.Module) -> Any:
            put_back()
            if options.outside is not None and id(module) not in states:
                states[id(module)] = OutsideState(module, self.config.loss)
            runs = self.config.runs(module, self._short, self.device)
            return runs.whole() if self._short is None else runs.brief()

        built = [] if self.reference is None else [self.reference.module]
        astray, *rebuilt = look_at_copies(self.module, self.skeleton, [skeleton_of(self.skeleton), *built], run)
        put_back()
        again = rebuilt == [""]
        return replace(options, astray="" if again else astray, rebuilt=bool(astray) and again, again=again)

    def _seen(self, config: TrainConfig, options: Options) -> Options:
        """Return `options`, completed by what the model draws itself and what couples the rows of a batch."""
        example = on_device(config.hints.example, self.device)
        look = first_runs(self.module, example, inputs=config.inputs, loss=config.loss, parts=self.world_size)
        self._short = look.short
        options = replace(options, draws=look.draws, outside=look.outside, changes=look.changes, caches=look.caches)
        if self.world_size > 1 or config.compute.microbatch_size is not None:
            run: Callable[[Any], Any] = partial(call, self.module)
            if look.outside is not None and not look.outside.drawn:
                run = put_back_before(run, self.module, config.loss)
            options = replace(options, **self._rows(config, run, look))
        return options

    def _runs(self, module: nn.Module) -> ModelRuns:
        """Return how `module`, the whole model, is run on the example."""
        runs = self.config.runs(module, self._short, self.device)
        if self.options.outside is None:
            return runs
        whole, brief = (put_back_before(run, module, self.config.loss) for run in (runs.whole, runs.brief))
        return replace(runs, whole=whole, brief=brief)

    def learn(self, strategies: Sequence[Strategy]) -> None:
        """Give every rank the facts about the model that `strategies` need. Collective.

        Rank 0 finds out what it does not know yet, while the others wait. Sends nothing if all ranks know the facts.
        """
        new = [each for each in (one.composed for one in strategies) if each not in self._told and facts_for(each)]
        if self.options.looked is None or not new:
            return
        facts: list[Any] = [self.look_for(new) if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(facts, src=0, device=self.device)
        self._know(**facts[0])
        self._told.update(new)

    def learned(self, strategy: Strategy) -> bool:
        """Return True if all ranks have the facts about the model that `strategy` needs. The same on every rank."""
        return self.options.looked is None or not facts_for(strategy) or strategy.composed in self._told

    def look_for(self, strategies: Sequence[Strategy], *, beside: bool = False) -> Mapping[str, Any]:
        """Find out, on this rank, the facts about the model that `strategies` need. Return all known facts.

        Sends nothing. The model is run on the example, with weights that take no memory. beside: run it while the model
        trains, from any thread; where that is impossible, nothing new is found.
        """
        with self._looking:
            if wanted := lacking(self.options, strategies):
                threaded = beside and accelerator().holds(self.device)

                def find() -> dict[str, Any]:
                    # The model's own collectives do not wait for other ranks here.
                    with stand_in(Alone()), outside_kept(self.module, self.config.loss):
                        return find_later(self.skeleton, self._runs, self.options, wanted, beside=threaded)

                with suppress(NotAside):
                    self._know(**(self.aside(find) if beside else find()))
            return told(self.options)

    def _know(self, **facts: Any) -> None:
        with self._knowing:
            self.options = self.shard_layouts.options = replace(self.options, **facts) if facts else self.options

    def _rows(self, config: TrainConfig, run: Callable[[Any], Any], look: FirstRuns) -> dict[str, Any]:
        """Return what couples the rows of a batch, and what weighs them, as attributes of Options."""
        with suppress(Exception), undrawn():  # an error of the data is reported when it is read to train
            sample = config.sample() if config.sample is not None else Sample(config.hints.example)
            if sample is not None:
                self._many = sample.batch
                seen = examine(self.module, run, config.loss, sample, config.inputs, look=look)
                coupled = seen.coupled
                if coupled is None and look.reads:
                    coupled = split_by_values(self.module, run, sample, config.inputs)
                return {"coupled": coupled, "counted": seen.counted}
        return {}

    def may_cut(self) -> None:
        """Prepare a single process to cut its rows into micro-batches. Examines the rows now and in the next batches.

        Does nothing with several ranks, or if rows are cut already.
        """
        if self.world_size > 1 or self.options.cut:
            return
        self._first_batches.part()
        if self.config.hints.example is not None:
            look = FirstRuns(self.options.draws, self._short)
            self.choose(**self._rows(self.config, lambda value: call(self.module, value), look))

    def choose(self, **options: Any) -> None:
        """Change attributes of Options within a job. All sharded models made from now on have them."""
        self._know(**options)
        self._ready, self._changes = None, self._changes + 1
