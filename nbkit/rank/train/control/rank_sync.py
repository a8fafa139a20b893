"""Keep ranks equal: compare settings, and bring all ranks to the same step after an interrupted training.

An interrupt reaches each rank at another point: one rank has updated its weights, another has not. So the next training
begins with a comparison. Data moves only if a step was interrupted. It moves from ranks with complete weights to ranks
that are behind or half-way. The target is the latest step of which ranks with complete weights together hold
everything.

`compare_ranks` compares settings of the optimizer, the seed, paths, data and constants of the model. It gathers small
digests when a run begins, at a save, a switch and an evaluation, and every EVERY steps. If they differ, a second gather
sends the values.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.parallel.process_groups import has_met_all, meet_groups
from nbkit.rank.parallel.reshard.plain_attributes import OF_MODULES
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import by_name, counted_once
from nbkit.rank.train.step.optimizer_state import forget, settings_of, take_settings
from nbkit.tensor_layout import Layout

Job = Any  # nbkit.rank.train.job's, which imports this file

EVERY = 100
"""The number of steps between two comparisons."""

_SHOWN = 4


class Integrity:
    """The state of this rank's weights after an error.

    broken_off: a step was interrupted, so ranks may differ by a step. half_way: some weights are from before a change,
    and some from after it.
    """

    def __init__(self) -> None:
        self.broken_off = self.half_way = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the weights inside. If an error leaves the block, they stay marked as half-way."""
        self.half_way = True
        yield
        self.half_way = False

    def restored(self, *, ranks_agree: bool) -> None:
        """Note that the weights are complete again. ranks_agree: all ranks are also at the same step."""
        self.half_way = False
        self.broken_off &= not ranks_agree


@dataclass(frozen=True)
class Standing:
    """The progress of a rank, in numbers. broken_off, half_way: see Integrity. strategy: a checksum of its text.

    leads_back: no step under the strategy is finished, so the switch can still be taken back. met: the groups of the
    strategy were used since the world was last formed.
    """

    step: int
    broken_off: bool
    half_way: bool
    strategy: int
    leads_back: bool
    met: bool = True


@dataclass(frozen=True)
class TrainingProgress:
    """The state besides tensors that a rank takes over from another: loss scale, step, history, data position."""

    precision: dict[str, Any]
    step: int
    records: list[dict[str, Any]]
    position: Any


class RankSync:
    """Keeps the ranks of a job at one step, with the same weights and settings. Its methods are collective."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def resync(self) -> None:
        """Bring all ranks to the same step if a step was interrupted, unless steps are being made. Collective.

        Replicas that train apart are averaged. Raises TrainingError, on every rank, if the ranks are under different
        strategies, or if no step is complete. That happens if all ranks were interrupted within a step, or if a rank
        that was interrupted holds a part of the state alone.
        """
        if not self._job.is_running:
            self.resync_now()
        self.take_over()

    def take_over(self) -> None:
        """Take over the user's changes of the model, and average replicas that train apart. Collective.

        Raises TrainingError for a change that is not possible.
        """
        job = self._job
        job.check_model()
        if job.sharded_model.data.apart > 1:
            with job.integrity.changing():
                job.sharded_model.data.unite()

    def resync_now(self) -> None:
        """Do the same as `resync`, even while steps are being made, but do not average replicas. Collective."""
        job = self._job
        kind, leads_back = zlib.crc32(str(job.strategy).encode()), job.switcher.pending is not None
        connections = job.sharded_model.connections
        met = has_met_all(connections)
        own = Standing(job.step, job.integrity.broken_off, job.integrity.half_way, kind, leads_back, met)
        everyone = compare(own, world_size=job.world_size, device=job.device)
        if len({each.strategy for each in everyone}) > 1:
            raise TrainingError(
                "An interrupted switch left the ranks under different strategies.",
                numbers=f"rank {job.rank}: {job.strategy}",
                hint="build the Trainer again, and trainer.load(path) of a checkpoint",
            )
        if not all(each.met for each in everyone):
            meet_groups(connections, job.device)
        if not all(each.leads_back for each in everyone):
            job.switcher.forget()  # some ranks have finished the first step under it, or do not know of the switch
        if not (whole := whole_ranks(everyone)):
            return
        mine = job.progress
        steps, inner = [each.step for each in everyone], job.optimizer.inner
        progress = move_furthest(job.sharded_model, inner, mine, steps, whole, rank=job.rank, device=job.device)
        if progress is not mine:
            job.stand_at(progress)
        self.restored()

    def average_replicas(self) -> None:
        """Average replicas that train apart, including optimizer state, so that all ranks have it. Collective."""
        job = self._job
        if job.sharded_model.data.apart == 1:
            return
        own = job_state.per_element(job.sharded_model, job.optimizer.inner)
        everyone = all_gather_objects(set(own), world_size=job.world_size, device=job.device)
        shared = sorted(set.intersection(*everyone))  # ranks that ran other branches have state for other parameters
        with job.integrity.changing():
            job.sharded_model.data.unite([own[key][0] for key in shared])

    def compare_settings(self) -> None:
        """Raise TrainingError, on every rank, if the ranks have different settings. Collective."""
        job = self._job
        values = {**settings_by_name(job.optimizer.inner), "seed": job.seed}
        hint = (
            "change them in the same way on every rank, by numbers that all ranks have, such as "
            "trainer.history[-1]['loss']"
        )
        compare_ranks(values, world_size=job.world_size, device=job.device, what="settings", hint=hint)

    def restored(self) -> None:
        """Note that all ranks are at the same step with the same weights again. Collective."""
        job = self._job
        job.integrity.restored(ranks_agree=True)
        job.training_step.begin_again()

    def sync_step(self, asked: int | None) -> None:
        """Continue at the common step boundary after new ranks have joined. Collective. asked: see Backups."""
        job = self._job
        self.restored()
        job.backups.form_again(asked, job.step)
        job.back_up(now=True)


def compare_ranks(
    values: Mapping[str, Any], *, world_size: int, device: torch.device, what: str, hint: str = "the same on every rank"
) -> None:
    """Raise TrainingError, on every rank, if `values` differ between ranks. It names the first difference. Collective.

    what: a plural noun for the values.
    """
    if world_size == 1:
        return
    own = {name: repr(value) for name, value in values.items()}
    digests = all_gather_objects(zlib.crc32(repr(sorted(own.items())).encode()), world_size=world_size, device=device)
    if len(set(digests)) == 1:
        return
    everyone = all_gather_objects(own, world_size=world_size, device=device)
    names = sorted({name for each in everyone for name in each if len({other.get(name) for other in everyone}) > 1})
    shown = ", ".join(str(each.get(names[0], "none"))[:40] for each in everyone[:_SHOWN])
    raise TrainingError(
        f"The ranks have different {what}: {names[0]!r} differs.",
        numbers=f"on ranks 0, 1, ...: {shown}{', ...' * (world_size > _SHOWN)}; {len(names)} in all",
        hint=hint,
    )


def settings_by_name(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers and flags of each group of `optimizer`. Keys are like "lr of group 0"."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, int | float | str) or (isinstance(value, tuple) and all(map(_is_number, value))):
                found[f"{key} of group {number}"] = value
    return found


def constants_of(module: nn.Module) -> dict[str, Any]:
    """Return checksums of tensors, and floats, in attributes of `module` and its submodules outside of state_dict."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in OF_MODULES:
                continue
            if isinstance(value, Tensor) and value.device.type != "meta" and value.layout == torch.strided:
                raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found[f"{path}.{name}" if path else name] = (tuple(value.shape), zlib.crc32(raw.numpy().tobytes()))
            elif isinstance(value, float):
                found[f"{path}.{name}" if path else name] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def compare(own: Standing, *, world_size: int, device: torch.device) -> list[Standing]:
    """Return the progress of all ranks, by rank. Collective: one all-gather of six numbers."""
    if world_size == 1:
        return [own]
    mine = torch.tensor([int(each) for each in vars(own).values()], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return [
        Standing(step, bool(off), bool(half), kind, bool(back), bool(met))
        for step, off, half, kind, back, met in (one.tolist() for one in gathered)
    ]


def whole_ranks(everyone: Sequence[Standing]) -> list[int]:
    """Return the ranks with complete weights, or [] if no step was interrupted and all ranks are at the same step.

    Raises TrainingError, on every rank, if no rank has complete weights.
    """
    steps = [each.step for each in everyone]
    if len(set(steps)) == 1 and not any(each.broken_off or each.half_way for each in everyone):
        return []
    whole = [rank for rank, each in enumerate(everyone) if not each.half_way]
    if not whole:
        raise TrainingError(
            "Every rank was interrupted within a step: no rank has whole weights.",
            numbers=f"finished steps: {', '.join(map(str, steps))}",
            hint="trainer.load(path) of a checkpoint, or build the Trainer again",
        )
    return whole


@dataclass(frozen=True)
class _RankState:
    """A description of the state of a rank, for the others.

    weights: layouts of weights and buffers. state: layouts of optimizer state. params: parameter -> layout of its
    optimizer state. kinds, numbers: see job_state.
    """

    weights: Mapping[str, Layout]
    state: Mapping[str, Layout]
    params: Mapping[str, Layout]
    kinds: Mapping[str, torch.dtype]
    numbers: Mapping[str, Mapping[str, Any]]


def move_furthest(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    own: TrainingProgress,
    steps: Sequence[int],
    whole: Sequence[int],
    *,
    rank: int,
    device: torch.device,
) -> TrainingProgress:
    """Move weights and optimizer state of the latest complete step to the ranks that lack them. Collective.

    Returns the progress with which every rank continues. Raises TrainingError, on every rank, if no step is complete.
    """
    sources = [0]
    if len(steps) > 1:
        sources = _move(sharded_model, optimizer, steps, whole, rank=rank, device=device)
        held: list[Any] = [(settings_of(optimizer), own) if rank == sources[0] else None]
        dist.broadcast_object_list(held, src=sources[0], device=device)
        settings, taken = held[0]
        if rank != sources[0]:
            take_settings(optimizer, settings)
            own = taken
    if len(set(steps)) > 1 and rank == 0:
        warnings.warn(
            f"the last training was interrupted within a step: finished steps of ranks 0-{len(steps) - 1} were "
            f"{', '.join(map(str, steps))}; all ranks continue from rank {sources[0]}'s step {steps[sources[0]]}",
            stacklevel=4,
        )
    return own


def _move(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    whole: Sequence[int],
    *,
    rank: int,
    device: torch.device,
) -> list[int]:
    """Bring every rank to the same complete step. Return the ranks that sent its state."""
    own = job_state.state(sharded_model, optimizer)
    weights = job_state.weights(sharded_model) | job_state.buffers(sharded_model)
    everyone = all_gather_objects(
        _RankState(
            {key: layout for key, (_, layout) in weights.items()},
            {key: layout for key, (_, layout) in own.items() if key not in weights},
            dict(sharded_model.layouts),
            {key: tensor.dtype for key, (tensor, _) in own.items()},
            job_state.scalars(sharded_model, optimizer),
        ),
        world_size=len(steps),
        device=device,
    )
    plan, sources = _furthest(everyone, steps, whole)
    if rank not in sources:
        kinds = {key: kind for source in sources for key, kind in everyone[source].kinds.items()}
        numbers = {name: dict(values) for one in sources for name, values in everyone[one].numbers.items()}
        forget(optimizer)
        job_state.allocate(sharded_model, optimizer, by_name(kinds), numbers)
        own = job_state.state(sharded_model, optimizer)
    Exchange(plan, rank).run({key: own[key] for key in plan.old[rank]}, own, device=device)
    sharded_model.data.refresh()
    return sources


def _furthest(
    everyone: Sequence[_RankState], steps: Sequence[int], whole: Sequence[int]
) -> tuple[ExchangePlan, list[int]]:
    """Return the exchange that brings all ranks to the same step, and the ranks that send its state."""
    why = ""
    for step in sorted({steps[rank] for rank in whole}, reverse=True):
        sources = [rank for rank in whole if steps[rank] == step]
        try:
            return _plan(everyone, sources), sources
        except TrainingError as error:
            why = why or str(error.numbers)
    raise TrainingError(
        "The ranks were interrupted at different places of a step, and no step is whole: some parts of the "
        "tensors that the strategy splits are from before the step, and others are from after it.",
        numbers=f"finished steps: {', '.join(map(str, steps))}; missing: {why}",
        hint="trainer.load(path) of a checkpoint, or build the Trainer again",
    )


def _plan(everyone: Sequence[_RankState], sources: Sequence[int]) -> ExchangePlan:
    """Return the exchange from `sources` to the others. Raises TrainingError if `sources` lack something."""
    kinds = {key: kind for rank in sources for key, kind in everyone[rank].kinds.items()}
    old: list[dict[str, Layout]] = []
    new: list[dict[str, Layout]] = []
    for rank, held in enumerate(everyone):
        kinds |= {key: kind for key, kind in held.kinds.items() if key in held.weights}
        if rank in sources:
            old.append({**held.weights, **held.state})
            new.append(old[-1])
        else:
            old.append({})
            cut = [(key, key.partition("/")[2]) for key in kinds if not key.startswith(("weight/", "buffer/"))]
            new.append({**held.weights, **{key: held.params[name] for key, name in cut if name in held.params}})
    plan = ExchangePlan.of(counted_once(old), new, {key: kind.itemsize for key, kind in kinds.items()})
    there = {name for rank in sources for name in everyone[rank].params}
    for rank, held in enumerate(everyone):
        # A tensor may have one owner. No other rank knows its optimizer state, so the plan does not notice a loss.
        kept = {key.partition("/")[2] for key in held.state} | {name for name, of in held.numbers.items() if of}
        if alone := sorted(kept - there):
            raise TrainingError(
                "A rank that updates whole tensors for all ranks was interrupted in an update.",
                numbers=f"the optimizer's state of {alone[0]!r} and {len(alone) - 1} others, for rank {rank}",
                hint="trainer.load(path) of a checkpoint",
            )
    return plan
