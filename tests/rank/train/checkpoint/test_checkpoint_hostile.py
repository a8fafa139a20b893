"""Test that a damaged or harmful checkpoint is refused with a plain message, and the training goes on unchanged."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import flat, quiet
from ranks import run_ranks
from safetensors.torch import load_file
from spoiling import adamw, data_files, flip, refused_everywhere

from nbkit.errors import TrainingError

METADATA = "torch.distributed.checkpoint.metadata"


def call(module: str, name: str, *args: bytes | str) -> bytes:
    """Return a pickle that calls `name` of `module`. The name may have dots, as protocol 4 allows."""

    def text(word: str) -> bytes:
        return b"\x8c" + bytes([len(word.encode())]) + word.encode()

    def argument(value: bytes | str) -> bytes:
        return b"B" + struct.pack("<I", len(value)) + value if isinstance(value, bytes) else text(value)

    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + b"".join(map(argument, args)) + b"tR."


def pickles(canary: Path) -> dict[str, bytes]:
    """Return harmful pickles. Most of them create `canary` if a reader runs them."""
    touch = f"touch {canary}"
    python = f"__import__('os').mkdir({str(canary)!r})"
    return {
        "dotted": call(METADATA, "os.system", touch),
        "dotted twice": call(METADATA, "os.path.os.system", touch),
        "system": call("os", "system", touch),
        "eval": call("builtins", "eval", python),
        "dotted eval": call(METADATA, "os.sys.modules.__class__", "x"),
        "torch.load": call("torch", "load", str(canary)),
        "bytes": call("torch.storage", "_load_from_bytes", call("os", "system", touch)),
        "dtype's": call("torch", "serialization.os.system", touch),
        "run": call("subprocess", "call", "touch", str(canary)),
        # This would change the class itself, for the whole process: {} and then (None, {"harmed": True}).
        "class": f"c{METADATA}\nMetadata\n".encode() + b"(N}X\x06\x00\x00\x00harmed\x88stb.",
        "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
        "nothing": b"N.",
    }


def harmful_pickles(folder: Path) -> dict[str, Callable[[Path], Any]]:
    canary = folder / "canary"
    found: dict[str, Callable[[Path], Any]] = {}
    for name, harm in pickles(canary).items():

        def whole(path: Path, harm: bytes = harm) -> None:
            (path / ".metadata").write_bytes(harm)

        def in_front(path: Path, harm: bytes = harm) -> None:
            (path / ".metadata").write_bytes(harm + (path / ".metadata").read_bytes())

        def among(path: Path, harm: bytes = harm) -> None:
            # The pickle replaces the description of a tensor in each data file.
            for file in data_files(path):
                content = file.read_bytes()
                at = content.index(b"\x80\x02ctorch._utils")
                file.write_bytes(content[:at] + harm[: len(content) - at] + content[at + len(harm) :])

        found |= {f"{name}, alone": whole, f"{name}, in front": in_front, f"{name}, in the data": among}

    def inside(path: Path) -> None:
        # This is torch's own Metadata, with a harmful value besides its tensors.
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data = {"nbkit": pickles(canary)["dotted"]}
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return found | {"inside": inside}


def test_no_checkpoint_runs_code(tmp_path: Path) -> None:
    refused_everywhere(tmp_path, harmful_pickles, or_equal=True)

    from torch.distributed.checkpoint.metadata import Metadata

    assert not (tmp_path / "canary").exists() and not hasattr(Metadata, "harmed")


def damages(folder: Path) -> dict[str, Callable[[Path], Any]]:
    def cut(path: Path, length: int) -> None:
        os.truncate(path, length if length >= 0 else path.stat().st_size + length)

    def instead(path: Path, make: Callable[[Path], Any]) -> None:
        path.rename(path.with_name("aside"))
        make(path)

    def elsewhere(path: Path, name: str) -> None:
        # The metadata for torch names a file outside of the directory, with the same bytes.
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = name.format(info.relative_path)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    found: dict[str, Callable[[Path], Any]] = {
        "file of the parent": lambda path: elsewhere(path, "../good/{}"),
        "file by its whole path": lambda path: elsewhere(path, f"{folder}/good/{{}}"),
    }
    for length in (0, 1, 10, 47, 48, 500, -500, -49, -48, -1):
        found[f"metadata cut to {length}"] = lambda path, n=length: cut(path / ".metadata", n)
        found[f"data cut to {length}"] = lambda path, n=length: cut(data_files(path)[1], n)
    for name, of in {"metadata": lambda path: path / ".metadata", "data": lambda path: data_files(path)[0]}.items():
        found |= {
            f"no {name}": lambda path, of=of: of(path).unlink(),
            f"{name} with an end of its own": lambda path, of=of: of(path).open("ab").write(b"more"),
            f"{name} of a terabyte": lambda path, of=of: cut(of(path), 1 << 40),
            f"{name} is a folder": lambda path, of=of: instead(of(path), Path.mkdir),
            f"{name} is a pipe": lambda path, of=of: instead(of(path), os.mkfifo),
            f"{name} is a link": lambda path, of=of: instead(of(path), lambda link: link.symlink_to("aside")),
            f"{name} is a device": lambda path, of=of: instead(of(path), lambda link: link.symlink_to("/dev/zero")),
        }
    return found


def test_truncated_or_missing_files_are_refused_before_any_change(tmp_path: Path) -> None:
    refused_everywhere(tmp_path, damages)


def flips(folder: Path, times: int) -> dict[str, Callable[[Path], Any]]:
    draw = random.Random(4)
    found: dict[str, Callable[[Path], Any]] = {}
    for number in range(times):
        which, place, value = number % 3, draw.random(), draw.randrange(1, 256)
        found[f"flip {number}"] = lambda path, which=which, place=place, value=value: flip(
            [path / ".metadata", *data_files(path)][which], place, value
        )
    return found


@pytest.mark.parametrize("times", [12, pytest.param(48, marks=pytest.mark.long)])
def test_flipped_bytes_are_refused_or_change_nothing(tmp_path: Path, times: int) -> None:
    texts = refused_everywhere(tmp_path, partial(flips, times=times), or_equal=True)

    assert sum("checksum" in text for text in texts) > times / 3


def seen_by_one(world: Any, folder: Path) -> list[str]:
    """Load as if each rank had its own disk. That of rank 1 is damaged, or has an older checkpoint."""
    trainer, found = quiet(optimizer=adamw), []
    for name in ("old", "new"):
        trainer.fit(1)
        trainer.save(folder / name)
    if world.place.rank == 0:
        for name in ("metadata", "data"):
            shutil.copytree(folder / "new", folder / name)
        flip(folder / "metadata" / ".metadata", 0.5)
        for file in data_files(folder / "data"):
            for place in range(100):
                flip(file, place / 100)
    dist.barrier()
    before = flat(trainer.model)
    for name in ("metadata", "data", "old"):
        with pytest.raises(TrainingError) as raised:
            trainer.load(folder / (name if world.place.rank == 1 else "new"))
        found.append(raised.value.numbers)
        assert torch.equal(before, flat(trainer.model))
    trainer.fit(1)
    return found


def test_damage_that_only_one_rank_sees_is_refused_by_all(tmp_path: Path) -> None:
    one, other = run_ranks(seen_by_one, 2, tmp_path, timeout=120)

    assert one == other
    assert "rank 1: " in one[0] and ".metadata is damaged" in one[0]
    assert "rank 1: " in one[1] and ".distcp is damaged" in one[1]
    assert "rank 1: its result differs from that of rank 0" in one[2]


def saved_over_a_link(world: Any, folder: Path) -> None:
    trainer = quiet()
    trainer.fit(1)
    trainer.save(folder / "model")


def test_saves_and_exports_do_not_follow_links_in_the_directory(tmp_path: Path) -> None:
    from nbkit.rank.train.checkpoint.export_safetensors import export  # at the top it would cost each worker a second

    (tmp_path / "model").mkdir()
    (tmp_path / "precious").write_text("mine")
    for name in (".metadata.tmp", "weights.tmp"):
        (tmp_path / "model" / name).symlink_to(tmp_path / "precious")

    run_ranks(saved_over_a_link, 1, tmp_path, timeout=60)
    export(tmp_path / "model", tmp_path / "model" / "weights")

    assert (tmp_path / "precious").read_text() == "mine"
    assert load_file(tmp_path / "model" / "weights")["0.weight"].shape == (16, 6)
