"""Checks whether a checkpoint fits the job that is to go on from it. Looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.write_plan import by_name
from nbkit.tensor_layout import Layout

if TYPE_CHECKING:
    from nbkit.rank.train.checkpoint.dcp_io import Reader


def check_fits(
    about: Mapping[str, Any],
    *,
    names: Sequence[tuple[str, str, tuple[int, ...]]],
    groups: Sequence[Sequence[str]],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Raises TrainingError when `about` is of another model (names, shapes), or of an optimizer with other groups.

    names, groups, settings: as checkpoint.save writes them, of this job.
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
            "The checkpoint is of an optimizer with other parameter groups.",
            numbers=f"parameters per group: {list(map(len, there))} there, {list(map(len, groups))} here",
            hint="build the optimizer that was saved",
        )
    for here, kept in zip(settings, about["settings"], strict=True):
        for key, value in kept.items():
            if key in here and not _alike(here[key], value):
                raise TrainingError(
                    "The checkpoint is of an optimizer with other settings.",
                    numbers=f"{key} is {value!r:.80} there, {here[key]!r:.80} here",
                    hint="build the optimizer that was saved",
                )


def check_tensors(reader: Reader, sharded_model: ShardedModel) -> None:
    """Raises ValueError when of what this rank holds something is missing, damaged, or kept as another kind."""
    dtypes = reader.kinds
    wanted: dict[str, Layout] = {}
    for key, (tensor, layout) in (job_state.weights(sharded_model) | job_state.buffers(sharded_model)).items():
        wanted[key] = layout
        if (kept := dtypes.get(key)) is not None and _kind(kept) != _kind(tensor.dtype):
            raise ValueError(f"{key} is {kept} there, {tensor.dtype} here")
    for name, kinds in by_name(dtypes).items():
        if name in sharded_model.held:
            wanted |= {f"{key}/{name}": sharded_model.data.layouts[name] for key in kinds}
    reader.verify(wanted)


def _alike(here: Any, there: Any) -> bool:
    """Whether `there` can stand where `here` does: a number for a number, as many for several."""
    if here is None or there is None:
        return True
    if isinstance(here, list | tuple):
        return isinstance(there, list | tuple) and len(here) == len(there) and all(map(_alike, here, there))
    if isinstance(here, int | float):
        return isinstance(there, int | float)
    return isinstance(there, type(here))


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
