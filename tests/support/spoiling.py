"""Damage checkpoints in many ways, load each on two ranks, export it, and return the results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import net, quiet
from ranks import run_ranks
from safetensors.torch import load_file

from nbkit.errors import TrainingError
from nbkit.rank.train.checkpoint.job_state import state


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def state_now(trainer: Any) -> dict[str, Any]:
    tensors = {
        key: tensor.clone()
        for key, (tensor, _) in state(trainer.job.sharded_model, trainer.job.optimizer.inner).items()
    }
    return {"tensors": tensors, "step": trainer.step, "lr": trainer.lr, "history": [*trainer.history]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = one["tensors"].keys() == other["tensors"].keys() and all(
        torch.equal(value, other["tensors"][key]) for key, value in one["tensors"].items()
    )
    return tensors and all(one[key] == other[key] for key in ("step", "lr", "history"))


def tried(world: Any, folder: Path, spoil: Callable[[Path], dict[str, Callable[[Path], Any]]]) -> dict[str, str]:
    """Load the checkpoint, damaged in each of these ways, on this rank. Return name -> "equal" or an error text.

    A refused checkpoint must change nothing, and the trainer must still train at the end.
    """
    saved = quiet(optimizer=adamw)
    saved.fit(2)
    saved.save(folder / "good")
    expected = state_now(saved)
    trainer = quiet(optimizer=adamw)
    trainer.fit(1)
    before, found = state_now(trainer), {}
    for number, (name, change) in enumerate(spoil(folder).items()):
        path = folder / f"spoiled {number}"
        if world.place.rank == 0:
            shutil.copytree(folder / "good", path)
            change(path)
        dist.barrier()
        try:
            trainer.load(path)
            found[name] = "equal" if same(state_now(trainer), expected) else "loaded, and is another"
        except TrainingError as error:
            found[name] = str(error) if same(state_now(trainer), before) else f"changed the state: {error}"
        except Exception as error:
            found[name] = f"{type(error).__name__} escaped: {error}"
        if not same(state_now(trainer), before):
            trainer = quiet(optimizer=adamw)
            trainer.fit(1)
            before = state_now(trainer)
    trainer.fit(1)
    return found


def exported(folder: Path, name: str) -> str:
    """Export a damaged checkpoint. Return "exported", or what went wrong."""
    from nbkit.rank.train.checkpoint.export_safetensors import export  # at the top it would cost each worker a second

    target = folder / "model.safetensors"
    target.write_bytes(b"what was there")
    try:
        export(folder / name, target)
    except TrainingError as error:
        return str(error) if target.read_bytes() == b"what was there" else f"overwrote the file: {error}"
    except Exception as error:
        return f"{type(error).__name__} escaped: {error}"
    shapes = {key: value.shape for key, value in load_file(target).items()}
    return "exported" if shapes == {key: value.shape for key, value in net().state_dict().items()} else "no such model"


def refused_everywhere(folder: Path, spoil: Callable[[Path], Any], *, or_equal: bool = False) -> list[str]:
    """Load it on two ranks, damaged in each of these ways, then export it. Return the texts of the refusals.

    or_equal: the damaged part may not matter. An export may succeed even if no training can continue from it.
    """
    one, other = run_ranks(tried, 2, folder, spoil, timeout=300)
    assert one == other
    fine = ("equal",) if or_equal else ()
    for number, (name, text) in enumerate(one.items()):
        assert text.startswith((*fine, "The checkpoint ", "The data ends before ")), (name, text)
        assert "\n→ " in text or text in fine, (name, text)
        text = exported(folder, f"spoiled {number}")
        assert text.startswith(("exported", "The checkpoint ")), (name, text)
    return list(one.values())


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def flip(file: Path, place: float, value: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= value
    file.write_bytes(content)
