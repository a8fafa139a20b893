"""The log of the ranks' parent: what it prints, with the time."""

from __future__ import annotations

import time
from contextlib import suppress


def log(text: str) -> None:
    with suppress(OSError):  # over SSH nobody may read it any more
        print(f"{time.strftime('%H:%M:%S')} parent: {text}", flush=True)
