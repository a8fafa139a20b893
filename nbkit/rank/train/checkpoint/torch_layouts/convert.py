"""Converts a checkpoint of nbkit to another program's torch.distributed.checkpoint layout. Needs no process group.

python -m nbkit.rank.train.checkpoint.torch_layouts.convert DIR TARGET LAYOUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.train.checkpoint.dcp_io import DcpReader, fill
from nbkit.rank.train.checkpoint.job_state import by_name
from nbkit.tensor_layout import Layout

LAYOUTS = ("fsdp2", "torchtitan")


def convert(folder: str | Path, target: str | Path, layout: str) -> tuple[int, int]:
    """Write the checkpoint in `folder` to the new directory `target`. Return (number of tensors, step).

    layout: "fsdp2", {"model": ..., "optim": ...} as `get_state_dict` gives them; or "torchtitan", the weights under
    their own names, a flattened optimizer and train_state.step. Memory holds the contents of the checkpoint once.
    Raises TrainingError if `folder` is no checkpoint or is damaged, or if `target` exists or cannot be written.
    """
    try:
        if layout not in LAYOUTS:
            raise ValueError(f"there is no layout {layout!r:.40}, only {', '.join(LAYOUTS)}")
        if Path(target).exists():
            raise ValueError(f"{target} is there already")
        reader = DcpReader(Path(folder))
        state = (_plain if layout == "fsdp2" else _torchtitan)(reader)
        save(state, checkpoint_id=target, no_dist=True)
    except Exception as error:  # the directory may contain anything
        raise TrainingError(
            f"The checkpoint {str(folder)!r} could not be converted to {str(target)!r}.",
            numbers=f"{type(error).__name__}: {error}",
            hint="nbkit checkpoint convert DIR TARGET --to fsdp2   (DIR as given to trainer.save)",
        ) from error
    return len(reader.tensors), reader.about["step"]


def _plain(reader: DcpReader) -> dict[str, Any]:
    about = reader.about
    settings = zip(about["settings"], about["groups"], strict=True)
    groups = [{**group, "params": list(names)} for group, names in settings]
    return {"model": _model(reader), "optim": {"state": _optimizer(reader), "param_groups": groups}}


def _torchtitan(reader: DcpReader) -> dict[str, Any]:
    about = reader.about
    flat: dict[str, Any] = {}
    for name, kept in _optimizer(reader).items():
        flat |= {f"state.{name}.{key}": value for key, value in kept.items()}
    for group, names in zip(about["settings"], about["groups"], strict=True):
        flat |= {f"param_groups.{name}.{key}": value for name in names for key, value in group.items()}
    return {**_model(reader), "optimizer": flat, "train_state": {"step": torch.tensor(about["step"])}}


def _model(reader: DcpReader) -> dict[str, Tensor]:
    return {name: _tensor(reader, key, tuple(shape)) for name, key, shape in reader.about["names"]}


def _optimizer(reader: DcpReader) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of each parameter, by name."""
    found: dict[str, dict[str, Any]] = {name: dict(numbers) for name, numbers in reader.about["numbers"].items()}
    for name, kinds in by_name(reader.kinds).items():
        for kind in kinds:
            key = f"{kind}/{name}"
            found.setdefault(name, {})[kind] = _tensor(reader, key, reader.tensors[key].shape)
    return {name: kept for name, kept in found.items() if kept}


def _tensor(reader: DcpReader, key: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.zeros(shape, dtype=reader.kinds.get(key, torch.float32))  # a tensor without elements is not saved
    fill(reader, {key: (tensor, Layout.whole(shape))})
    return tensor


if __name__ == "__main__":
    try:
        number, made = convert(*sys.argv[1:])
    except NbkitError as failure:
        sys.exit(f"nbkit: {failure}")
    print(f"{sys.argv[2]}: {number} tensors, step {made}")
