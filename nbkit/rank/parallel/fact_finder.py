"""Find the facts about a model by running it. Rank 0 finds them once, and sends them to all ranks.

The model runs on an example before the first step, and later when a strategy needs more facts. While rank 0 finds facts
before the first step or between two steps, the other ranks wait, so that they do not disturb its time measurements.

`FactFinder` is used by a job and by `nbkit.check`. `find_facts` does the work. Each fact is an attribute of
`ModelFacts`, or several attributes that are found together.

If the user's model, loss or data raises an error here, the fact keeps its default, and training reports the error in
full. If only nbkit's way to run them raises an error, the strategy is still compared with one process before its first
step (whole_step.py), and the rows of the first batches are examined (first_batches.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.aside import NotAside
from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.thread_group import Alone
from nbkit.rank.data.batch import call, on_device, pair, rows_of
from nbkit.rank.data.sample_rows import Sample, undrawn
from nbkit.rank.device import accelerator
from nbkit.rank.loss.loss_check import examine, split_by_values
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.context.positionwise import try_in_parts
from nbkit.rank.parallel.experts.find import RoutedLayers, find_routed
from nbkit.rank.parallel.model_facts import ModelFacts, needed_facts
from nbkit.rank.parallel.module.block_discovery import experts_in
from nbkit.rank.parallel.module.copies import build_again, built_again, hooked_gradient, runnable, skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import find_chain, hidden_between, measure_costs
from nbkit.rank.parallel.proof.outside_state import OutsideState, outside_kept, put_back_before
from nbkit.rank.parallel.proof.own_parts import look_at_copies
from nbkit.rank.parallel.proof.short_example import FirstRuns, first_runs
from nbkit.rank.parallel.proof.unchanged import DroppingNothing, set_evaluation
from nbkit.rank.parallel.tensor.proof.prove import prove
from nbkit.rank.parallel.whole_step import WIDE, Reference
from nbkit.rank.parallel.zero3.gather_plan import plan_gathers
from nbkit.rank.rng.keyed_dropout import repeating
from nbkit.rank.rng.seeding import generators_left_alone
from nbkit.strategy import Strategy


@dataclass(frozen=True)
class ModelExample:
    """The rows on which the facts about a model are found, and how the model and the loss run on them.

    batch: a few rows; None if nothing can be run. loss: None if it is not known. sample: returns the rows on which the
    loss is examined; None means those of `batch`. parts_rows: True if the rows of a batch go through several forward
    passes. stages, tp_plan: see ModelHints. autocast: the dtype in which the model trains, or None for its own.
    """

    batch: Any
    loss: Loss | None
    inputs: Sequence[str] | None = None
    sample: Callable[[], Sample | None] | None = None
    parts_rows: bool = False
    stages: Sequence[str] | None = None
    tp_plan: Mapping[str, str] | None = None
    autocast: torch.dtype | None = None

    def runs(self, module: nn.Module, short: Any, device: torch.device) -> ModelRuns:
        """Return how `module`, the whole model, is run. short: a few positions of the rows that show as much."""
        few = self.batch if short is None else short
        return ModelRuns(
            self,
            lambda: call(module, pair(on_device(self.batch, device), self.inputs)[0]),
            self._loss_of(self.batch, device),
            lambda: call(module, pair(on_device(few, device), self.inputs)[0]),
            self._loss_of(few, device),
        )

    def _loss_of(self, rows: Any, device: torch.device) -> Callable[[Any], Tensor] | None:
        loss = self.loss
        if loss is None:
            return None

        def of(output: Any) -> Tensor:
            return weigh(loss(output, pair(on_device(rows, device), self.inputs)[1]), rows_of(rows)).value

        return of


@dataclass(frozen=True)
class ModelRuns:
    """The ways to run one module, a model or a copy of it, on an example.

    whole: runs the module once. brief: runs it on a few positions of each row. loss, brief_loss: return the loss of
    their outputs; None if no loss is known.
    """

    example: ModelExample
    whole: Callable[[], Any]
    loss: Callable[[Any], Tensor] | None
    brief: Callable[[], Any]
    brief_loss: Callable[[Any], Tensor] | None


class FactFinder:
    """The facts about one model, and the runs that find them.

    facts: the facts that this rank knows now. synced: strategies whose facts are known to all ranks. short: a shorter
    example, if few positions show as much. many: rows of the data, more than in the example. reference: a second model
    from the user's callable, used in proofs as the model of one process.
    """

    short: Any = None
    many: Any = None
    reference: Reference | None = None

    def __init__(
        self,
        module: nn.Module,
        facts: ModelFacts,
        example: ModelExample,
        *,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        ranks: int | None = None,
        aside: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        """module: the model. ranks: the number of ranks that will train it; None means the world size. aside: runs a
        function while the model trains; see Builder.aside.
        """
        self.module, self.facts, self.example, self.synced = module, facts, example, set[Strategy]()
        self.rank, self.world_size, self.device, self._aside = rank, world_size, device, aside
        self._ranks = world_size if ranks is None else ranks
        self._skeleton = facts.shapes.skeleton
        self._finding, self._setting = threading.Lock(), threading.Lock()

    def begin(self, build: Callable[[], nn.Module] | None, wanted: Collection[str]) -> None:
        """Find the facts that every strategy needs, and those that are `wanted`. All ranks must call it.

        build: the callable that built the model, if there is one. wanted: see `needed_facts`. Raises TrainingError, on
        every rank, if the model uses parts of a copy, or registers parameters or buffers while it runs.
        """
        self.set_facts(experts=experts_in(self._skeleton), hooked=hooked_gradient(self.module))
        if self.example.batch is None:
            return
        self.reference = self._built_again(build)
        refused = self._first_facts(wanted) if self.rank == 0 else None
        if self.world_size > 1:
            sent: list[Any] = [self.facts.sendable(), refused]
            dist.broadcast_object_list(sent, src=0, device=self.device)
            self.set_facts(**sent[0])
            refused = sent[1]
        if refused is not None:
            raise refused
        if not self.facts.again:
            self.reference = None
        if self.facts.rebuilt:
            build_again(self._skeleton, partial(built_again, build))  # type: ignore[arg-type]

    def sync(self, strategies: Sequence[Strategy]) -> None:
        """Give every rank the facts that `strategies` need. All ranks must call it.

        Rank 0 finds the facts that it does not know yet, while the others wait. Nothing is sent if all ranks know the
        facts.
        """
        new = [each for each in (one.composed for one in strategies) if not self.is_synced(each)]
        if not new:
            return
        facts: list[Any] = [self.find(new).sendable() if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(facts, src=0, device=self.device)
        self.set_facts(**facts[0])
        self.synced.update(new)

    def is_synced(self, strategy: Strategy) -> bool:
        """Return True if all ranks have the facts that `strategy` needs. The same on every rank."""
        return self.facts.looked is None or not needed_facts(strategy) or strategy.composed in self.synced

    def find(self, strategies: Sequence[Strategy], *, beside: bool = False) -> ModelFacts:
        """Find the facts that `strategies` need, on this rank. Return all known facts. Sends nothing.

        The model is run on the example, with weights that take no memory. beside: run it while the model trains, from
        any thread; if that is impossible, nothing new is found.
        """
        with self._finding:
            if wanted := self.facts.missing(strategies):
                threaded = beside and accelerator().holds(self.device)

                def run() -> dict[str, Any]:
                    # The model's own collectives must not wait for other ranks here.
                    with stand_in(Alone()), outside_kept(self.module, self.example.loss):
                        return find_later(self._skeleton, self._runs, self.facts, wanted, beside=threaded)

                with suppress(NotAside):
                    self.set_facts(**(self._aside(run) if beside and self._aside is not None else run()))
            return self.facts

    def set_facts(self, **facts: Any) -> None:
        """Change facts. Facts that are equal stay the same objects, because caches rely on this."""
        with self._setting:
            self.facts = self.facts.updated(facts)

    def examine_rows(self) -> None:
        """Find what couples the rows of a batch and what weights them. Needed when a process begins to split rows."""
        if self.example.batch is not None:
            look = FirstRuns(self.facts.draws, self.short)
            self.set_facts(**self._rows(lambda value: call(self.module, value), look))

    def _built_again(self, build: Callable[[], nn.Module] | None) -> Reference | None:
        """Return a second model from the same callable, or None if the callable cannot build one.

        Every rank builds it, as it built the first one. `_compare_copies` checks that the first model still computes
        the same.
        """
        few = sum(p.numel() for p in self._skeleton.parameters()) <= WIDE
        if build is None or self._ranks == 1 or not few:
            return None
        # A model may register itself where the loss looks for it. The first model must stay registered there. If the
        # callable raises an error, there is no second model, and proofs run copies of the first.
        with suppress(Exception), outside_kept(self.module, self.example.loss):
            return Reference(built_again(build, self._skeleton, first=self.module))
        return None

    def _first_facts(self, wanted: Collection[str]) -> TrainingError | None:
        """Find the first facts, on rank 0. Return why the model cannot be copied, for the other ranks, or None."""
        refused: TrainingError | None = None
        self.set_facts(looked=frozenset[str]())
        with stand_in(Alone()) as here, outside_kept(self.module, self.example.loss) as outside:
            with suppress(Exception):  # see the module: training reports errors of the model
                self._run_first()
            outside.put_back()
            try:
                self._compare_copies()
            except TrainingError as error:
                refused = error if self._ranks > 1 else None
            except Exception:
                pass  # if the model or loss cannot run on the example, nothing is known about copies
            if wanted:
                self.set_facts(**find_facts(self.module, self._runs(self.module), self.facts, wanted))
        if here.heard:
            # Rows that are coupled in one process may not be coupled if ranks gather them. A whole step shows it.
            self.set_facts(collectives=here.heard[0], coupled=None)
        return refused

    def _run_first(self) -> None:
        """Find the model's own random numbers, the state that it keeps outside, and what couples rows of a batch."""
        example, batch = self.example, on_device(self.example.batch, self.device)
        look = first_runs(self.module, batch, inputs=example.inputs, loss=example.loss, parts=self._ranks)
        self.short = look.short
        self.set_facts(draws=look.draws, outside=look.outside, changes=look.changes, caches=look.caches)
        if self._ranks > 1 or example.parts_rows:
            run: Callable[[Any], Any] = partial(call, self.module)
            if look.outside is not None and not look.outside.drawn:
                run = put_back_before(run, self.module, example.loss)
            self.set_facts(**self._rows(run, look))

    def _compare_copies(self) -> None:
        """Check whether copies of the model, with their own parts, compute the same as the model."""
        states: dict[int, OutsideState] = {}  # the first one holds the state that all of them share

        def put_back() -> None:
            for state in states.values():
                state.put_back()

        def run(module: nn.Module) -> Any:
            put_back()
            if self.facts.outside is not None and id(module) not in states:
                states[id(module)] = OutsideState(module, self.example.loss)
            runs = self.example.runs(module, self.short, self.device)
            return runs.whole() if self.short is None else runs.brief()

        built = [] if self.reference is None else [self.reference.module]
        astray, *rebuilt = look_at_copies(self.module, self._skeleton, [skeleton_of(self._skeleton), *built], run)
        put_back()
        again = rebuilt == [""]
        self.set_facts(astray="" if again else astray, rebuilt=bool(astray) and again, again=again)

    def _rows(self, run: Callable[[Any], Any], look: FirstRuns) -> dict[str, Any]:
        """Return what couples the rows of a batch, and what weights them, as attributes of ModelFacts."""
        example = self.example
        with suppress(Exception), undrawn():  # see the module: training reports errors of the data and the loss
            sample = example.sample() if example.sample is not None else Sample(example.batch)
            if sample is not None:
                self.many = sample.batch
                seen = examine(self.module, run, example.loss, sample, example.inputs, look=look)
                coupled = seen.coupled
                if coupled is None and look.reads:
                    coupled = split_by_values(self.module, run, sample, example.inputs)
                return {"coupled": coupled, "counted": seen.counted}
        return {}

    def _runs(self, module: nn.Module) -> ModelRuns:
        """Return how `module`, the whole model, is run on the example."""
        runs = self.example.runs(module, self.short, self.device)
        if self.facts.outside is None:
            return runs
        whole, brief = (put_back_before(run, module, self.example.loss) for run in (runs.whole, runs.brief))
        return replace(runs, whole=whole, brief=brief)


def find_facts(module: nn.Module, runs: ModelRuns, facts: ModelFacts, wanted: Collection[str]) -> dict[str, Any]:
    """Search for the `wanted` facts and return them as attributes of ModelFacts. They include failures.

    module: the whole model, in training mode. It is restored. Other ranks must be idle meanwhile, because seconds are
    measured.
    """
    found: dict[str, Any] = {"looked": (facts.looked or frozenset()) | frozenset(wanted)}
    if sizes := sorted(int(name.removeprefix("tp=")) for name in wanted if name.startswith("tp=")):
        proof = prove(module, runs.whole, sizes, runs.example.tp_plan, brief=runs.brief)
        verdicts = {**facts.proof.verdicts, **proof.verdicts}
        found["proof"] = replace(proof, verdicts=verdicts, flow=proof.flow or facts.proof.flow)
    if "gathers" in wanted:
        with suppress(Exception):  # without a plan, the first step of ZeRO 3 is watched (`proven` of data_axis)
            found["gathers"] = plan_gathers(
                module,
                _followed_by(runs.loss, runs.whole),
                brief=_followed_by(runs.brief_loss, runs.brief),
                autocast=runs.example.autocast,
            )
    if "routed" in wanted:
        try:
            found["routed"] = find_routed(module, runs.whole, rows=rows_of(runs.example.batch))
        except Exception as error:
            found["routed"] = RoutedLayers(why=f"{type(error).__name__}: {error}")
    try:
        _along_the_chain(module, runs, facts, wanted, found)
    except Exception as error:
        found["no_chain"] = str(error) if isinstance(error, NbkitError) else f"{type(error).__name__}: {error}"
    return found


def _followed_by(loss: Callable[[Any], Tensor] | None, run: Callable[[], Any]) -> Callable[[], Any]:
    return run if loss is None else lambda: loss(run())


def _along_the_chain(
    module: nn.Module, runs: ModelRuns, facts: ModelFacts, wanted: Collection[str], found: dict[str, Any]
) -> None:
    chain = facts.chain
    if "chain" in wanted:
        with repeating(module, facts.draws, runs.example.batch) as drawing:
            chain = find_chain(
                module, lambda: drawing(runs.whole), stages=runs.example.stages, brief=lambda: drawing(runs.brief)
            )
        with _evaluating(module):
            found["chain"], found["hidden"] = chain, hidden_between(module, chain, runs.whole)
    if chain is None:
        return
    if "costs" in wanted:
        with _evaluating(module):
            found["costs"] = measure_costs(module, chain, runs.whole)
    if "positionwise" in wanted:
        with repeating(module, facts.draws, runs.example.batch) as drawing:
            found["positionwise"] = try_in_parts(module, chain.units, lambda: drawing(runs.whole), runs.loss)


class _evaluating:
    """Sets the module to evaluation mode inside this context. Afterwards each part is in its own mode again."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._modes = module, [(part, part.training) for part in module.modules()]

    def __enter__(self) -> None:
        set_evaluation(self._module)

    def __exit__(self, *_: object) -> None:
        for part, mode in self._modes:
            part.training = mode


def find_later(
    skeleton: nn.Module,
    runs_of: Callable[[nn.Module], ModelRuns],
    facts: ModelFacts,
    wanted: Collection[str],
    *,
    beside: bool,
) -> dict[str, Any]:
    """Find facts like find_facts, after the whole model was split. Use its shapes, with weights that take no memory.

    beside: run in a thread during training, and do not change its random numbers. Then return {} for a model that draws
    random numbers itself, because it can only be run between two steps.
    """
    if beside and facts.draws is not None:
        return {}
    with ExitStack() as around:
        if beside:
            around.enter_context(generators_left_alone())
            around.enter_context(DroppingNothing())
        try:
            module = runnable(skeleton)
            return find_facts(module, runs_of(module), facts, wanted)
        except Exception as error:
            if beside:
                raise
            # The other ranks wait for an answer.
            looked = (facts.looked or frozenset()) | frozenset(wanted)
            return {"looked": looked, "no_chain": f"{type(error).__name__}: {error}"}
