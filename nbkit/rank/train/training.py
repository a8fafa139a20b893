"""The training on this rank: model, optimizer and progress, and every operation that changes them as a whole."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError, TrainingError
from nbkit.planner.link_speed import WorldLinks, ranks_of_node
from nbkit.quoting import user_path
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.comm.link_probe import link_of
from nbkit.rank.data.data_state import DataHooks
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.reshard.plain_attributes import put
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.telemetry.sinks import Sink
from nbkit.rank.train import argument_checks
from nbkit.rank.train.builder import Builder, Model, Optimizer
from nbkit.rank.train.checkpoint import checkpoint, job_state
from nbkit.rank.train.checkpoint.job_state import bytes_per_element
from nbkit.rank.train.checkpoint.manifest import writable
from nbkit.rank.train.checkpoint.writer import CheckpointWriter
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.control import recovery
from nbkit.rank.train.control.active_job import Integrity
from nbkit.rank.train.control.rank_agreement import compare_ranks, settings_by_name
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.recommend import AUTO, ordered, recommend
from nbkit.rank.train.replace.backup import Backups
from nbkit.rank.train.run_recorder import Recorder
from nbkit.rank.train.runs_dir import check_room
from nbkit.rank.train.step.history import History
from nbkit.rank.train.step.model_handle import ModelHandle, show_again, shown_by
from nbkit.rank.train.step.optimizer_state import OptimizerHandle, settings_of
from nbkit.rank.train.step.precision import Precision
from nbkit.rank.train.step.step import TrainingStep
from nbkit.rank.train.switch.pending_switch import PendingSwitch
from nbkit.rank.train.training_state import TrainingState
from nbkit.rank.world import meeting
from nbkit.rank.world.world import World
from nbkit.records.events import Switched
from nbkit.strategy import Strategy


class Training:
    """A model, its optimizer and their progress. `model` and `optimizer` stay the same objects throughout.

    pending: the last switch, until a step has been made under it.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, config: TrainConfig, *, strategy: str, later: Sequence[str] = ()
    ) -> None:
        """later: strategies that are planned to be switched to."""
        here = self._take_place()
        meeting.meet("Trainer() or prepare()")
        # Refuse a wrong strategy before a model is built.
        if strategy != AUTO:
            Strategy.parse(strategy, self.world_size)
        link = link_of(self.device)
        chosen = None if strategy == AUTO else _parsed(strategy, self.world_size, link)
        asked = Strategy.every(self.world_size, schedules=("1f1b",)) if chosen is None else [chosen]
        for text in later:
            with suppress(StrategyError):  # the plan is checked later, when the batch is known too
                asked = [*asked, _parsed(text, self.world_size, link)]
        builder = Builder(model, optimizer, config, asked=asked, **here)
        self._begin(builder)
        self.precision.check(builder.skeleton)
        if chosen is None:
            recommended = recommend(builder)
            chosen = recommended.strategy
            if self.rank == 0:
                print(recommended)
        chosen = ordered(builder, chosen)
        self._handle.check_alone(chosen)
        self.start(*builder.first(chosen))

    def parsed(self, text: str) -> Strategy:
        """Return the strategy that `text` means on these ranks, which may be on several nodes. Raises StrategyError."""
        return _parsed(text, self.world_size, self.builder.link)

    def _take_place(self) -> dict[str, Any]:
        place = World.join_from_env().place
        self.rank, self.world_size = place.rank, place.world_size
        self.device = accelerator().device(place.device)
        self.recorder = Recorder(self.device)  # before the model exists: memory is counted from here
        return {"rank": self.rank, "world_size": self.world_size, "device": self.device}

    def _begin(self, builder: Builder) -> None:
        self.builder, self.config, self.seed = builder, builder.config, builder.config.seed
        self.precision = Precision(self.config.precision, device=self.device, world_size=self.world_size)
        self.model, self._handle = builder.module, ModelHandle(builder.module)
        self.ledger = History(world_size=self.world_size, device=self.device)
        self.integrity, self.feed = Integrity(), DataHooks()
        self.backups = Backups(rank=self.rank, world_size=self.world_size, device=self.device)
        self.checkpoint_writer = CheckpointWriter(rank=self.rank, world_size=self.world_size, device=self.device)
        self.switches: list[Switched] = []
        self.pending: PendingSwitch | None = None
        self.run_dir: Path | None = None
        self.sinks: tuple[Sink, ...] = ()  # the user's
        self._running = self._late = False
        self._cost_model: CostModel | None = None

    def start(self, sharded_model: ShardedModel, inner: torch.optim.Optimizer) -> None:
        """Compute with `sharded_model`, the first of this process, and update with `inner`."""
        self.optimizer = OptimizerHandle(inner, update=self._update, forgotten=self._forgotten, fits=self._fits)
        self._take(sharded_model, inner)

    def _take(self, sharded_model: ShardedModel, inner: torch.optim.Optimizer) -> None:
        self.sharded_model = sharded_model
        self.optimizer.inner = inner
        # The user's model object now shows what this rank holds. What it showed before is freed.
        self._handle.show(sharded_model.module, sharded_model.strategy)
        self._known = {id(p) for p in self.model.parameters()}
        self.builder.computing = weakref.ref(sharded_model)
        self.builder.took(inner)
        self.training_step = TrainingStep(
            sharded_model,
            inner,
            self.builder,
            precision=self.precision,
            ledger=self.ledger,
            integrity=self.integrity,
            backups=self.backups,
            seed=self.seed,
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        return self.sharded_model.strategy

    @property
    def previous(self) -> str | None:
        """The strategy before the last switch, proven or not. From any thread."""
        if (pending := self.pending) is not None and pending.previous is not None:
            return pending.event.old
        return self.switches[-1].old if self.switches else None

    def close_left_groups(self, coming: Strategy | None = None) -> None:
        """Close the groups that neither the strategy in force nor a way back uses, if they hold memory of a device.

        coming: the strategy that is about to be switched to; the way back then leads to the strategy in force now.
        Collective, between two steps.
        """
        kept = {self.strategy, self.strategy if coming is None else coming}
        if len(kept) == 1 and self.previous is not None:
            kept.add(self.parsed(self.previous))
        if self.pending is not None:
            kept.add(self.pending.old)
        self.builder.close_groups(kept=kept)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.ledger.step

    @property
    def state(self) -> TrainingState:
        """Return what is in force now, between two steps."""
        sharded_model, inner = self.sharded_model, self.optimizer.inner
        position, precision = self.feed.position(), self.precision.state_dict()
        return TrainingState(sharded_model, inner, shown_by(sharded_model.module), self.step, position, precision)

    def adopt(self, state: TrainingState) -> None:
        """Compute with the sharded model of `state` and update with its optimizer from now on."""
        self.training_step.release()
        show_again(state.shown)
        self._take(state.sharded_model, state.optimizer)
        self.feed.recut()

    def restore(self, state: TrainingState) -> None:
        """Go back to `state`, as if later steps had not been made. Closes the later sharded model. Not collective."""
        self.optimizer.zero_grad()
        if (other := self.sharded_model) is not state.sharded_model:
            self.adopt(state)
            other.close()
        # If anything was broken off, it was in the other sharded model. The weights of `state` are whole.
        self.integrity.restored(ranks_agree=False)
        self.ledger.step = state.step
        self.precision.load_state_dict(state.precision)
        self.feed.go_to(state.position)

    def level(self) -> None:
        """Compare how far the ranks are, unless steps are being made; level them if a step was broken off. Collective.

        Replicas that train apart are averaged. Raises TrainingError, on every rank, if the ranks are under different
        strategies, or if no step is whole on the ranks that finished it. That happens when all of them were interrupted
        within a step, or when a part of the state exists nowhere else.
        """
        if not self._running:
            self.level_now()
        self.check_model()
        if self.sharded_model.data.apart > 1:
            with self.integrity.changing():
                self.sharded_model.data.unite()

    def level_now(self) -> None:
        """Level the ranks as `level` does, even while steps are being made. Averages no replicas. Collective."""
        kind, leads_back = zlib.crc32(str(self.strategy).encode()), self.pending is not None
        own = recovery.Standing(self.step, self.integrity.broken_off, self.integrity.half_way, kind, leads_back)
        everyone = recovery.compare(own, world_size=self.world_size, device=self.device)
        if len({each.strategy for each in everyone}) > 1:
            raise TrainingError(
                "An interrupted switch left the ranks under different strategies.",
                numbers=f"rank {self.rank}: {self.strategy}",
                hint="build the Trainer again, and trainer.load(path) of a checkpoint",
            )
        if not all(each.leads_back for each in everyone):
            self.pending = None  # some ranks have made the first step under this strategy, or do not know of the switch
        if not (whole := recovery.whole_ranks(everyone)):
            return
        mine = self.progress
        steps, inner = [each.step for each in everyone], self.optimizer.inner
        progress = recovery.level(self.sharded_model, inner, mine, steps, whole, rank=self.rank, device=self.device)
        if progress is not mine:
            self._stand_at(progress)
        self._whole_again()

    @property
    def waits_for_update(self) -> bool:
        """Return True if gradients are summed over the ranks and the optimizer has not stepped with them yet."""
        pending = self.ledger.pending
        return self.training_step.reduced and bool(pending) and not pending[-1].made

    def check_model(self) -> None:
        """Take over tensors or memory that the user has put in the place of the model's parameters.

        Raises TrainingError if that is impossible, or if the model is another job's.
        """
        self._handle.check()
        self.sharded_model.data.follow()
        argument_checks.check_parameters(
            self.optimizer, self.model, known=self._known, held=self.sharded_model.held.values()
        )

    def unite(self) -> None:
        """Average replicas that train apart, optimizer state included, so that any rank has the state. Collective."""
        if self.sharded_model.data.apart == 1:
            return
        own = job_state.per_element(self.sharded_model, self.optimizer.inner)
        everyone = all_gather_objects(set(own), world_size=self.world_size, device=self.device)
        shared = sorted(set.intersection(*everyone))  # ranks that ran other branches have state of other parameters
        with self.integrity.changing():
            self.sharded_model.data.unite([own[key][0] for key in shared])

    @property
    def progress(self) -> recovery.TrainingProgress:
        """Return the state of this rank between two steps, without weights and optimizer."""
        precision, position = self.precision.state_dict(), self.feed.position()
        return recovery.TrainingProgress(precision, self.step, list(self.ledger.records), position)

    def _stand_at(self, progress: recovery.TrainingProgress) -> None:
        self.ledger.replace(progress.step, progress.records)
        self.precision.load_state_dict(progress.precision)
        self.feed.go_to(progress.position)

    def go_on(self, progress: recovery.TrainingProgress) -> None:
        """Continue from `progress`, whose weights are in place already. Not collective; `meet` follows."""
        self._stand_at(progress)
        self.integrity.restored(ranks_agree=False)

    def rewind(self, progress: recovery.TrainingProgress) -> None:
        """Go back to the earlier step of `progress`, whose weights are in place already. Collective."""
        self.backups.back_to(progress.step)
        self.ledger.replace(progress.step, progress.records, loaded=True)
        self.precision.load_state_dict(progress.precision)
        self.feed.go_to(progress.position)
        self._whole_again()

    def meet(self, asked: int | None) -> None:
        """Go on at a boundary that all ranks share, after new ranks have joined. Collective. asked: see Backups."""
        self._whole_again()
        self.backups.form_again(asked, self.step)
        self.back_up(now=True)

    def back_up(self, *, now: bool = False) -> None:
        """Take a backup of this boundary if one is due, or `now`. Collective if one is taken."""
        if self.ledger.newest is not None:
            self.backups.measured(self.ledger.newest.backup, max(self.ledger.newest.seconds))
            self.ledger.newest = None
        if self.backups.due(self.step) or (now and self.backups.on):
            inner = self.optimizer.inner
            layouts, names = self.sharded_model.plan.layouts, self.builder.names
            place = recovery.TrainingProgress(self.precision.state_dict(), self.step, [], self.feed.position())
            point = settings_of(inner), place
            self.backups.take(self.sharded_model, inner, layouts, names, self.step, point)

    def compare_ranks(self) -> None:
        """Raise TrainingError, on every rank alike, if the ranks have different settings. Collective."""
        values = {**settings_by_name(self.optimizer.inner), "seed": self.seed}
        hint = "change them on every rank alike, by numbers that all ranks have, such as trainer.history[-1]['loss']"
        compare_ranks(values, world_size=self.world_size, device=self.device, what="settings", hint=hint)

    def _whole_again(self) -> None:
        """Note that all ranks are at the same step with the same weights again. Collective."""
        self.integrity.restored(ranks_agree=True)
        self.training_step.begin_again()

    def save(self, path: str | Path, *, beside: bool = False, then: Callable[[], None] | None = None) -> None:
        """Write model, optimizer, step, position in the data, history and seed to the directory `path`. Collective.

        Raises TrainingError on every rank if one could not write, the ranks do not share `path`, weights are not
        finite, or max_disk is reached. What was at `path` then stays intact.
        beside: a thread writes it after a copy to host memory: see checkpoint/writer.py. then: called on rank 0 when it
        is whole.
        """
        path = user_path(path).absolute()  # a thread writes it, and a cell may change the working directory meanwhile
        meeting.meet("save")
        self.builder.template.check_saves(self.strategy)
        if self.run_dir is not None:
            check_room(self.run_dir.parent, path, "no checkpoint is written", run=self.run_dir.name)
        if not self.integrity.broken_off:
            self.check_model()
        self.compare_ranks()
        self.unite()
        if names := self.not_finite():
            raise TrainingError(
                "The weights are not finite: no checkpoint is written of them, and none is replaced by them.",
                numbers=f"step {self.step}: {names}; not written to {str(path)!r}",
                hint="trainer.load(path) of a checkpoint before it   (to keep these: trainer.full_state_dict())",
            )
        about = {"history": list(self.ledger.records), "seed": self.seed, "data": writable(self.feed.where())}
        if (outside := self.builder.facts.outside) is not None:
            about["attributes"], lost = outside.parted(self.model)
            if lost and self.rank == 0:
                named = ", ".join(map(repr, lost[:3]))
                warnings.warn(
                    f"no checkpoint holds {named}, which the model or the loss changes in each pass and reads in the "
                    "next: a training that loads it begins without. A buffer would be saved",
                    stacklevel=3,
                )
        self.checkpoint_writer.begin(checkpoint.take(path, self.state, self.builder, about), beside=beside, then=then)

    def not_finite(self) -> str:
        """Return which weights are not finite, and on which ranks; "" if all are. Collective: one small all-gather."""
        own = job_state.not_finite(self.sharded_model)
        told = all_gather_objects((own[:1], len(own)), world_size=self.world_size, device=self.device)
        ranks = [rank for rank, (_, count) in enumerate(told) if count]
        if not ranks:
            return ""
        (first,), count = told[ranks[0]]
        more = f" and {count - 1} more" if count > 1 else ""
        shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
        return f"{first}{more} on rank{'s' * (len(ranks) > 1)} {shown}"

    def opened(self, path: str | Path) -> checkpoint.Saved:
        """Open the checkpoint at `path`, if it fits. Changes nothing. Collective. Raises as checkpoint.opened does."""
        meeting.meet("load")
        return checkpoint.opened(user_path(path), self.state, self.builder, seed=self.seed, place_after=self.feed.after)

    def load(self, saved: checkpoint.Saved) -> None:
        """Load weights, optimizer, step, seed and history; not the position in the data. Collective.

        It loads in place, without a second copy. If a rank cannot read its part, no rank has whole weights, and the
        error says so.
        """
        self.builder.template.check_saves(self.strategy)
        about = saved.about
        with self.integrity.changing():
            checkpoint.restore(saved, self.sharded_model, self.optimizer.inner)
            self.seed = about["seed"]
            self.training_step.reseed(self.seed)
            self.ledger.replace(about["step"], about["history"], loaded=True)
            self.precision.load_state_dict(about.get("precision", {}))
            kept = ((name.rpartition("."), value) for name, value in about.get("attributes", {}).items())
            put({(path, name): value for (path, _, name), value in kept}, self.model)
        self._whole_again()
        if saved.foreign and self.rank == 0:
            print(f"{saved.named}: goes on after step {self.step} with the next batch of this training's own order")

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on the CPU, on every rank. Collective.

        Every parameter and buffer has its own name.
        """
        meeting.meet("full_state_dict")
        self.level()
        return checkpoint.full_state_dict(self.sharded_model, self.builder)

    def bytes_per_element(self) -> dict[str, dict[str, int]]:
        """Return bytes per element of every parameter and of its optimizer state: see job_state.bytes_per_element."""
        return bytes_per_element(self.sharded_model, self.optimizer.inner, self.builder.skeleton)

    def cost_model(self) -> CostModel:
        """Return the formulas that predict the cost of any strategy. From any thread."""
        seen, kinds = self._cost_model, self.bytes_per_element()
        if seen is None or not seen.holds(kinds, self.builder):
            seen = self._cost_model = CostModel(self.builder, kinds, self.feed.fits, before=seen)
        return seen

    def forget_estimates(self) -> None:
        """Drop the estimates, since the cost of a step has changed although the strategy has not."""
        self._cost_model = None

    @contextmanager
    def late_weights(self) -> Iterator[None]:
        """Let updates inside finish late: weights that other ranks updated are waited for only when they are read.

        The caller promises that until the next step no code reads weights through tensors that it kept.
        """
        self._late = self._running
        try:
            yield
        finally:
            self._late = False

    def _update(self) -> None:
        self.training_step.update(late=self._late)
        self.recorder.after_step(
            self.step,
            self.model,
            self.optimizer.inner,
            held=self.sharded_model.held.values(),
            strategy=self.strategy,
            cost_model=self.cost_model,
        )

    def _fits(self, param: nn.Parameter, key: str, shape: tuple[int, ...]) -> bool:
        """Return True if state of this shape fits `param`: see OptimizerHandle.

        Only the optimizer can judge state of other shapes, such as sums of rows.
        """
        data = self.sharded_model.data
        whole = next(data.layouts[name].shape for name, p in data.held.items() if p is param)
        return shape == tuple(param.shape) or not (shape == whole or key in self.builder.template.keys_per_element)

    def _forgotten(self, are_none: bool) -> None:
        self.training_step.reduced = False
        # Clear gradients of parameters that are in no group too: the next step would sum them once more.
        inside = set() if are_none else {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for p in self.sharded_model.data.leaves():
            if p.grad is not None and id(p) not in inside:
                p.grad = None


def _parsed(text: str, world_size: int, link: WorldLinks | None) -> Strategy:
    return Strategy.parse(text, world_size, node=None if link is None else ranks_of_node(link.node_of))
