"""Write a checkpoint under one strategy, and read it under any other.

A checkpoint is a directory. A save is atomic: it replaces the earlier checkpoint completely or not at all. Each rank
writes boxes of the tensors that it holds, so that every element is written once. A load reads on each rank the boxes
that this rank needs. Nothing is gathered. The directory has the format of torch.distributed.checkpoint (dcp_io.py) and
a manifest (manifest.py). nbkit reads the manifest instead of torch's pickles, so no file can run code here.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nbkit.errors import TornCheckpoint, TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.comm.agree import agree, failed_on
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import by_name, everyone, shares
from nbkit.rank.train.checkpoint.manifest import encoded
from nbkit.rank.train.checkpoint.own_state import (
    changed_by,
    names_of,
    set_extra_states,
    whole_state_dict,
    writable_states,
)
from nbkit.rank.train.step.optimizer_state import OWN_SETTINGS, forget, settings_of, take_settings
from nbkit.rank.train.transaction import TrainingState
from nbkit.tensor_layout import Box, Layout

if TYPE_CHECKING:
    from nbkit.rank.train.checkpoint.dcp_io import DcpReader


def check_fits(
    about: Mapping[str, Any],
    *,
    names: Sequence[tuple[str, str, tuple[int, ...]]],
    groups: Sequence[Sequence[str]],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Raise TrainingError if `about` is of another model (names, shapes) or another optimizer (groups, settings).

    names, groups, settings: those of this job, in the form of a checkpoint.
    """
    held = {name: shape for name, _, shape in names}
    found = {name: tuple(shape) for name, _, shape in about["names"]}
    if held != found:
        other = [name for name in held if name in found and held[name] != found[name]]
        raise TrainingError(
            "The checkpoint is of another model.",
            numbers=f"missing {sorted(held.keys() - found.keys())[:3]}, "
            f"unexpected {sorted(found.keys() - held.keys())[:3]}"
            + (f"; {other[0]} is {found[other[0]]} there, {held[other[0]]} here" if other else ""),
            hint="build the model that was saved",
        )
    there = about["groups"]
    if len(about["settings"]) != len(groups) or [set(each) for each in groups] != [set(each) for each in there]:
        raise TrainingError(
            "The checkpoint comes from an optimizer with other parameter groups.",
            numbers=f"parameters per group: {list(map(len, there))} there, {list(map(len, groups))} here",
            hint="build the optimizer that was saved",
        )
    for here, kept in zip(settings, about["settings"], strict=True):
        for key, value in kept.items():
            if key in here and not _alike(here[key], value):
                raise TrainingError(
                    "The checkpoint comes from an optimizer with other settings.",
                    numbers=f"{key} is {value!r:.80} there, {here[key]!r:.80} here",
                    hint="build the optimizer that was saved",
                )


def check_tensors(reader: DcpReader, sharded_model: ShardedModel) -> None:
    """Raise ValueError if a tensor that this rank needs is missing, damaged, or saved with another kind of dtype."""
    dtypes = reader.kinds
    wanted: dict[str, Layout] = {}
    for key, (tensor, layout) in (job_state.weights(sharded_model) | job_state.buffers(sharded_model)).items():
        wanted[key] = layout
        if (kept := dtypes.get(key)) is not None and _kind(kept) != _kind(tensor.dtype):
            raise ValueError(f"{key} is {kept} there, {tensor.dtype} here")
    for name, kinds in by_name(dtypes).items():
        if name in sharded_model.held:
            wanted |= {f"{key}/{name}": sharded_model.layouts[name] for key in kinds}
    reader.verify(wanted)


def _alike(here: Any, there: Any) -> bool:
    """Return True if `there` can replace `here`: both are numbers, or sequences of the same length."""
    if here is None or there is None:
        return True
    if isinstance(here, list | tuple):
        return isinstance(there, list | tuple) and len(here) == len(there) and all(map(_alike, here, there))
    if isinstance(here, int | float):
        return isinstance(there, int | float)
    return isinstance(there, type(here))


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


_WHOLE = "a directory that trainer.save wrote, the same for every rank"


@dataclass(frozen=True)
class Taken:
    """The part of a checkpoint that this rank writes.

    held: the tensors of this rank. shares: key -> boxes of the global tensor that this rank writes. kinds: key ->
    dtype, for the tensors of all ranks. about: everything that is not a tensor; rank 0 writes it.
    """

    path: Path
    step: int
    held: job_state.JobState
    shares: Mapping[str, Sequence[Box]]
    kinds: Mapping[str, torch.dtype]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that fits the job, but is not loaded yet. about: step, seed, position, history and settings.

    foreign: the recognised layout if another program wrote the checkpoint, otherwise "".
    """

    path: Path
    reader: DcpReader
    foreign: str = ""

    @property
    def about(self) -> Mapping[str, Any]:
        return self.reader.about

    @property
    def named(self) -> str:
        """The path, with the recognised layout of a foreign checkpoint."""
        return f"{self.path} ({self.foreign})" if self.foreign else str(self.path)


def take(path: str | Path, state: TrainingState, builder: Builder, about: Mapping[str, Any]) -> Taken:
    """Return this rank's part of a checkpoint of `state`, for `write`. Collective.

    path: the directory to write to. about: more values to save. The result refers to the tensors themselves, so write
    or copy them before they change.
    """
    sharded_model, optimizer = state.sharded_model, state.optimizer
    held = job_state.state(sharded_model, optimizer)
    every = everyone(held, job_state.scalars(sharded_model, optimizer), builder.world_size, builder.device)
    kept: dict[str, Any] = {
        "names": names_of(builder.skeleton),
        "changed_by": changed_by(builder.skeleton),
        "extra": writable_states(sharded_model, builder),
        "groups": builder.template.groups_of(optimizer, sharded_model.held),
        "settings": settings_of(optimizer),
        "numbers": dict(every.numbers),
        "step": state.step,
        "position": state.position or _beginning(optimizer),
        "precision": state.precision,
        "strategy": str(sharded_model.strategy),
        **about,
    }
    return Taken(Path(path), state.step, held, shares(every, builder.rank), every.kinds, kept)


def _beginning(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the position at the beginning of the data, which is saved for a user's own loop.

    Only the user knows which data such a loop has read. A Trainer that loads the checkpoint reads its data from the
    beginning.
    """
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return {"epoch": 0, "offset": 0, "base_lr": rates}


def write(taken: Taken, *, rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Write `taken`. Collective, from any thread. gather: an all-gather of objects over the ranks.

    Raises TrainingError on every rank if one could not write, or if the ranks do not share the directory. In that case
    an earlier checkpoint at the path stays intact.
    """
    # Imported here because the import is slow, and only a save needs it.
    from nbkit.rank.train.checkpoint.dcp_io import DcpWriter, Saving

    writer = DcpWriter(taken.path, rank)
    try:
        parts = _everywhere(lambda: writer.write(Saving(taken.held, taken.shares)), taken.path, gather)

        def put_in_place() -> list[int]:
            # If rank 0 sees the files of all ranks, all of them write to the same folder.
            if not (unseen := writer.unseen(parts)):
                writer.put_in_place(parts, encoded(taken.about))
            return unseen

        unseen, *_ = _everywhere(lambda: put_in_place() if rank == 0 else None, taken.path, gather)
        if unseen:
            raise not_shared([part.folder for part in parts], unseen)
    except BaseException:
        writer.discard()
        raise


def not_shared(folders: Sequence[str], ranks: Sequence[int]) -> TrainingError:
    """Return the error for a folder that `ranks` do not share with rank 0. folders: the path on each rank."""
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
    first, other = folders[0], folders[ranks[0]]
    where = f"rank 0 writes to {first!r}, rank {ranks[0]} to {other!r}"
    return TrainingError(
        "A checkpoint cannot be written here: the ranks do not share this folder, so no rank could read the "
        "checkpoint.",
        numbers=f"rank 0 does not see what {named} wrote: {where if first != other else f'{first!r} is not shared'}",
        hint="an absolute path on a file system that all hosts share: trainer.save('/shared/NAME'), "
        "checkpoints=nbkit.Checkpoints(path='/shared/NAME')",
    )


def check_shared(folder: Path, *, rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Raise TrainingError, on every rank, if the ranks do not share `folder`. Collective.

    Each rank writes a file there, rank 0 looks for all files, and then they are removed. A rank that cannot write to
    the folder is passed over. A save reports its error.
    """
    own, made = folder / f".nbkit-{secrets.token_hex(8)}", not folder.exists()
    told = [("", made, str(folder))]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch(exist_ok=False)
        except OSError:
            told = gather(("", made, str(folder)))
        else:
            told = gather((own.name, made, str(folder)))
        names = [name for name, _, _ in told] if rank == 0 and told[0][0] else []
        unseen, *_ = gather([each for each, name in enumerate(names) if name and not (folder / name).exists()])
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)
            if any(was_made for _, was_made, _ in told):
                folder.rmdir()  # succeeds on the last rank, when the folder is empty
    if unseen:
        raise not_shared([each for _, _, each in told], unseen)


def _everywhere(act: Callable[[], Any], path: Path, gather: Callable[[Any], list[Any]]) -> list[Any]:
    """Call `act` on every rank, and return the results of all ranks. Raises TrainingError on all if one failed."""
    found, own = None, None
    try:
        found = act()
    except BaseException as error:
        own = error
    # Report the free space: torch's error for a full disk is only "unexpected pos 704 vs 598".
    room = f"   ({_free_bytes(path) / 1e6:,.0f} MB are free there)" if own is not None else ""
    told = gather((found, "" if own is None else f"{type(own).__name__}: {own}{room}"))
    if isinstance(own, KeyboardInterrupt):
        raise own
    if failed := [(rank, text) for rank, (_, text) in enumerate(told) if text]:
        raise failed_on(f"The checkpoint {str(path)!r} could not be written.", failed)
    return [each for each, _ in told]


def _free_bytes(path: Path) -> int:
    absolute = path.absolute()
    return shutil.disk_usage(next(folder for folder in (absolute, *absolute.parents) if folder.exists())).free


def opened(
    path: str | Path, state: TrainingState, builder: Builder, *, seed: int, place_after: Callable[[int], Any]
) -> Saved:
    """Open the checkpoint at `path`, and check that it fits this model and optimizer. Changes nothing. Collective.

    nbkit has written it, or torch.distributed.checkpoint in a known layout: see torch_layouts.py. seed, place_after:
    see LoadTarget there. Raises TornCheckpoint on every rank if the checkpoint cannot be read or is incomplete, and
    TrainingError if it does not fit.
    Each rank reads everything that it will need, without keeping it. So damage is found before anything is changed.
    """
    found: list[Saved] = []
    own, names = settings_of(state.optimizer), names_of(builder.skeleton)
    settings = [{key: value for key, value in group.items() if key not in OWN_SETTINGS} for group in own]
    groups = builder.template.groups_of(state.optimizer, state.sharded_model.held)

    def open_it() -> str:
        from nbkit.rank.train.checkpoint.dcp_io import DcpReader
        from nbkit.rank.train.checkpoint.torch_layouts import LoadTarget, TorchReader, is_from_elsewhere

        foreign = is_from_elsewhere(Path(path))
        wanted = LoadTarget(names, groups, settings, seed, place_after)
        reader = TorchReader(Path(path), wanted) if foreign else DcpReader(Path(path))
        found.append(Saved(Path(path), reader, foreign=reader.layout if isinstance(reader, TorchReader) else ""))
        return reader.digest

    what = f"The checkpoint {str(path)!r} could not be read."
    _agree_whole(open_it, what)
    saved = found[0]

    def compare() -> None:
        check_fits(saved.about, names=names, groups=groups, settings=settings)

    agree(compare, what=what, hint=_WHOLE)
    _agree_whole(lambda: check_tensors(saved.reader, state.sharded_model), what)
    return saved


def _agree_whole(act: Callable[[], str | None], what: str) -> None:
    try:
        agree(act, what=what, hint=_WHOLE)
    except TrainingError as error:
        raise TornCheckpoint(error.what, numbers=error.numbers, hint=error.hint) from error.__cause__


def restore(saved: Saved, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Fill weights, buffers and optimizer state from a checkpoint of any strategy. Collective.

    The tensors are filled in place, without a second copy. If a rank cannot read its part, the weights are incomplete
    on all ranks, and the error says so.
    """
    from nbkit.rank.train.checkpoint.dcp_io import fill

    def read() -> None:
        take_settings(optimizer, saved.about["settings"])
        forget(optimizer)
        job_state.allocate(sharded_model, optimizer, by_name(saved.reader.kinds), saved.about["numbers"])
        fill(saved.reader, job_state.state(sharded_model, optimizer))
        set_extra_states(sharded_model.module, saved.about.get("extra", {}))

    agree(
        read,
        what=f"The checkpoint {str(saved.path)!r} could not be read to its end, so only some of the weights are from "
        "it.",
        hint=_WHOLE,
    )
    sharded_model.data.refresh()


def full_state_dict(sharded_model: ShardedModel, builder: Builder) -> dict[str, Tensor]:
    """Return the same `state_dict()` as in one process, on the CPU, on every rank. Collective.

    Each rank receives the parts that it lacks, in rounds of bounded size. Tied weights are one tensor, as in the model.
    """
    own = job_state.weights(sharded_model) | job_state.buffers(sharded_model)
    every = everyone(own, {}, builder.world_size, builder.device)
    names = names_of(builder.skeleton)
    wanted = {key: Layout.whole(shape) for _, key, shape in names}
    plan = ExchangePlan.of(
        every.layouts, [wanted] * builder.world_size, {key: kind.itemsize for key, kind in every.kinds.items()}
    )
    whole = {key: (torch.empty(layout.shape, dtype=every.kinds[key]), layout) for key, layout in wanted.items()}
    Exchange(plan, builder.rank).run(own, whole, device=builder.device)
    if changed_by(builder.skeleton):
        return whole_state_dict({key: tensor for key, (tensor, _) in whole.items()}, sharded_model, builder)
    return {name: whole[key][0] for name, key, _ in names}
