"""Test that a harmful manifest with right checksums is refused before memory is allocated or state changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spoiling import data_files, refused_everywhere

FOOTER = struct.Struct("<Q32s8s")


def forge(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the values of the manifest, and make all its checksums right again."""
    whole = path.read_bytes()
    length, _, magic = FOOTER.unpack(whole[-FOOTER.size :])
    head, text = whole[: -FOOTER.size - length], whole[-FOOTER.size - length : -FOOTER.size]
    values = json.loads(text)
    changed = change(values)
    new = changed if isinstance(changed, bytes) else json.dumps(values).encode()
    path.write_bytes(head + new + FOOTER.pack(len(new), hashlib.sha256(head + new).digest(), magic))


def put(*way: Any, value: Any) -> Callable[[Any], None]:
    """Put `value` at this place in the values of a manifest. If it is a function, call it with the old value."""

    def change(values: Any) -> None:
        for key in way[:-1]:
            values = values[key]
        values[way[-1]] = value(values[way[-1]]) if callable(value) else value

    return change


HUGE = 10**30
FILES, ROWS, ABOUT = 2, 3, 4  # their places in a manifest
FORGED: dict[str, Callable[[Any], Any]] = {
    "another format": put(0, value=2),
    "of the other endianness": put(1, value="big"),
    "no list": lambda values: b"{}",
    "nothing": lambda values: b"",
    "nested deeply": lambda values: b"[" * 1_000_000,
    "a number of many digits": lambda values: b"[3," + b"9" * 1_000_000 + b"]",
    "no text": lambda values: b"\xff\xfe\x00",
    "file of the parent": put(FILES, 0, 0, value=lambda name: f"../good/{name}"),
    "file by its whole path": put(FILES, 0, 0, value="/etc/passwd"),
    "file below": put(FILES, 0, 0, value="below/000000000000_0_0.distcp"),
    "file in no text": put(FILES, 0, 0, value=7),
    "file of huge size": put(FILES, 0, 1, value=HUGE),
    "file twice": put(FILES, 1, value=lambda row: ["0" * 12 + "_0_0.distcp", row[1]]),
    "key in no text": put(ROWS, 0, 0, value=["weight"]),
    "key twice": put(ROWS, 0, 0, value="weight/3.bias"),
    "dtype that is none": put(ROWS, 0, 1, value="os"),
    "dtype of another size": put(ROWS, 0, 1, value="float64"),
    "dtype of another kind": lambda values: [put(i, 1, value="int32")(values[ROWS]) for i in range(len(values[ROWS]))],
    "shape that is huge": put(ROWS, 0, 2, value=[10**9, 10**9]),
    "shape beyond all": put(ROWS, 0, 2, value=[HUGE]),
    "shape below zero": put(ROWS, 0, 2, value=[-1, -16]),
    "shape of many dims": put(ROWS, 0, 2, value=[1] * 1000 + [16]),
    "no chunk": put(ROWS, 0, 3, value=[]),
    "chunk of no file": put(ROWS, 0, 3, 0, 0, value=99),
    "chunk of the file before": put(ROWS, 0, 3, 0, 0, value=-1),
    "chunk before the file": put(ROWS, 0, 3, 0, 1, value=-1),
    "chunk behind the file": put(ROWS, 0, 3, 0, 1, value=1 << 40),
    "chunk beyond all": put(ROWS, 0, 3, 0, 1, value=HUGE),
    "chunk of half a byte": put(ROWS, 0, 3, 0, 1, value=0.5),
    "chunk of other bytes": put(ROWS, 0, 3, 0, 1, value=lambda start: start + 4),
    "chunk with another checksum": put(ROWS, 0, 3, 0, 2, value=7),
    "chunk outside": put(ROWS, 0, 3, 0, 3, value=1),
    "chunk too large": put(ROWS, 0, 3, 0, -1, value=1 << 50),
    "chunk without an end": put(ROWS, 0, 3, 0, value=lambda row: row[:-1]),
    "chunk twice": put(ROWS, 0, 3, value=lambda rows: rows * 2),
    "weight that is missing": put(ROWS, value=lambda rows: [row for row in rows if row[0] != "weight/0.weight"]),
    "tensor of the optimizer in another shape": lambda values: [
        row.__setitem__(slice(2, 4), [[16], [[*row[3][0][:3], 0, 16]]])
        for row in values[ROWS]
        if row[0] == "exp_avg/0.weight"
    ],
    "step below zero": put(ABOUT, "step", value=-1),
    "step that is true": put(ABOUT, "step", value=True),
    "step in text": put(ABOUT, "step", value="2"),
    "step beyond all": put(ABOUT, "step", value=HUGE),
    "seed beyond all": put(ABOUT, "seed", value=HUGE),
    "seed in parts": put(ABOUT, "seed", value=0.5),
    "epoch beyond all": put(ABOUT, "position", "epoch", value=1 << 62),
    "offset behind the data": put(ABOUT, "position", "offset", value=10**9),
    "rate in text": put(ABOUT, "position", "base_lr", value=["0.1"]),
    "no position": put(ABOUT, "position", value=None),
    "settings in text": put(ABOUT, "settings", value="lr"),
    "settings of no group": put(ABOUT, "settings", value=[]),
    "lr in text": put(ABOUT, "settings", 0, "lr", value="0.1"),
    "three betas": put(ABOUT, "settings", 0, "betas", value={"tuple": [0.9, 0.9, 0.9]}),
    "betas in text": put(ABOUT, "settings", 0, "betas", value={"tuple": ["a", "b"]}),
    "history in text": put(ABOUT, "history", value="long"),
    "record without a loss": put(ABOUT, "history", 0, value={"step": 1}),
    "record that is none": put(ABOUT, "history", 0, value=[1]),
    "names of another model": put(ABOUT, "names", 0, 0, value="other"),
    "names in another shape": put(ABOUT, "names", 0, 2, value=[1]),
    "names of nothing": put(ABOUT, "names", 0, 1, value="weight/none"),
    "names that are none": put(ABOUT, "names", value=[7]),
    "groups of numbers": put(ABOUT, "groups", value=[[1, 2]]),
    "groups that are none": put(ABOUT, "groups", value=7),
    "precision that is none": put(ABOUT, "precision", value="fp16"),
    "precision without a scale": put(ABOUT, "precision", value={"scale": 0.0, "finite": 1}),
    "numbers that are none": put(ABOUT, "numbers", value=[1]),
    "tensor that is huge": put(ABOUT, "numbers", value={"0.weight": {"step": {"tensor": ["float32", [10**12], ""]}}}),
    "tensor of no type": put(ABOUT, "numbers", value={"0.weight": {"step": {"tensor": ["os.system", [], ""]}}}),
    "tensor of no bytes": put(ABOUT, "numbers", value={"0.weight": {"step": {"tensor": ["float32", [], "!"]}}}),
    "key that is a list": put(ABOUT, "numbers", value={"dict": [[[1], 2]]}),
    "text for pairs": put(ABOUT, "numbers", value={"dict": ["abc"]}),
    "no text for a strategy": put(ABOUT, "strategy", value=7),
    **{f"no {field}": put(ABOUT, value=lambda about, field=field: {k: v for k, v in about.items() if k != field})
       for field in ("names", "groups", "settings", "numbers", "step", "position", "history", "seed", "precision")},
    "nothing about it": put(ABOUT, value=[]),
}  # fmt: skip


def forgeries(folder: Path) -> dict[str, Callable[[Path], Any]]:
    def forged(path: Path, change: Callable[[Any], Any]) -> None:
        (path / "below").mkdir()
        shutil.copy(data_files(path)[0], path / "below" / "000000000000_0_0.distcp")
        forge(path / ".metadata", change)

    return {name: lambda path, change=change: forged(path, change) for name, change in FORGED.items()}


def test_a_forged_manifest_is_refused_before_any_change(tmp_path: Path) -> None:
    assert len(refused_everywhere(tmp_path, forgeries)) == len(FORGED)
