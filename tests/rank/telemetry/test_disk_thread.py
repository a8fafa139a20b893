"""Test that a failed write is reported while the training goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from nbkit.rank.telemetry.sinks import Background


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_reported_once_at_the_next_write() -> None:
    full = os.open("/dev/full", os.O_WRONLY)

    def take(item: object) -> None:
        if isinstance(item, str):
            os.write(full, item.encode())

    writing = Background(take, lambda: os.close(full), name="full", what="recorded in here")
    with pytest.warns(UserWarning, match=r"nothing more is recorded in here: OSError: .*No space left") as caught:
        writing.put("step 1")
        seen = threading.Event()
        writing.put(seen)
        assert seen.wait(60)
        writing.put("step 2")
        assert len(caught) == 1
        writing.flush()
        writing.put("step 3")
    assert len(caught) == 1
    writing.end()
