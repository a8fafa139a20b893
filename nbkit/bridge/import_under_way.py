"""Whether an interrupt would break into the import of something installed, and the wait for its end.

What an import leaves when it is broken off cannot be imported again: extension modules load once in a process, and a
package whose parts are there already is not the one that its first import would have made. So an interrupt waits for
it. A module of the user's own may be a whole training: that is interrupted at once.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType

LONGEST_S = 60.0  # what takes longer is no import, or one that hangs
_LOOKED_S = 0.02

_IMPORTS = "<frozen importlib._bootstrap>"
_STDLIB = Path(sysconfig.get_path("stdlib"))


def is_importing(frame: FrameType | None) -> bool:
    """Whether something installed, of Python's own too, is being found, loaded or run for its import at `frame`."""
    body = ""
    for each, _ in walk_stack(frame):
        code = each.f_code
        if code.co_filename == _IMPORTS and code.co_name == "_find_and_load":
            if not body or _is_installed(body):
                return True
            body = ""
        elif code.co_name == "<module>":
            body = code.co_filename
    return False


def when_imported(interrupt: Callable[[], None], wanted: Callable[[], bool]) -> None:
    """From a thread, call `interrupt` when the main thread imports nothing installed; again until it is not `wanted`.

    After LONGEST_S it is called whatever the main thread does.
    """
    main, until = threading.main_thread().ident or 0, time.monotonic() + LONGEST_S

    def wait() -> None:
        while wanted():
            if time.monotonic() >= until or not is_importing(sys._current_frames().get(main)):
                interrupt()
            time.sleep(_LOOKED_S)

    threading.Thread(target=wait, name="nbkit-when-imported", daemon=True).start()


def _is_installed(file: str) -> bool:
    path = Path(file)
    return (
        file.startswith("<frozen")
        or {"site-packages", "dist-packages"} & {*path.parts} != set()
        or path.is_relative_to(_STDLIB)
    )
