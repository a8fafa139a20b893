"""Test that values in transit are removed if the notebook that sent them has died."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nbkit.notebook.cluster import registry
from nbkit.wire import parcel

SENDER = """
from nbkit.wire import parcel
token = parcel.reserve()
print(parcel.write(parcel.pack([1] * 1000)), parcel.write(parcel.pack(2), token + "/0"), flush=True)
"""


def test_values_of_dead_processes_are_removed_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))
    parcel.remove_left()
    paths = subprocess.run([sys.executable, "-c", SENDER], capture_output=True, text=True, check=True).stdout.split()
    left = [Path(paths[0]), Path(paths[1]).parent]
    own = Path(parcel.write(parcel.pack(3)))
    try:
        assert parcel.remove_left() == 0  # too young: a process in another container may still read it
        for path in (*left, own):
            os.utime(path, (time.time() - 2 * parcel.LEFT_AFTER,) * 2)
        assert registry.clean() == [
            f"values on their way to or from ranks, of notebooks that died: {len(left)} removed"
        ]
        assert not any(path.exists() for path in left)
        assert parcel.read(str(own)) == 3
    finally:
        own.unlink(missing_ok=True)
