"""Write a user's files atomically: on an error, such as a full disk, the old content stays and the error says why.

`uninterrupted` protects a cleanup from a second Ctrl-C.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbkit.errors import NbkitError


def write_file(path: Path, content: str | bytes) -> Path:
    """Write `content` to `path`, text as UTF-8, and return the absolute path. Raises NbkitError if that fails.

    Text may contain names from a file system that are not valid UTF-8. Their bytes are kept.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogateescape")
    target = path.absolute()
    # Write the target of a link, not the link. A pipe or a device is written directly.
    target = Path(os.path.realpath(target))
    beside = target.with_name(f".nbkit-{secrets.token_hex(6)}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            try:
                beside.write_bytes(content)
                if target.exists():
                    shutil.copymode(target, beside)
                beside.replace(target)
            finally:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
    except OSError as error:
        raise NbkitError(
            f"{str(path)!r} could not be written; what was there before stays.",
            numbers=f"{error.strerror or error}; {len(content):,} bytes{_free(target)}",
            hint="another path, on a disk with room",
        ) from None
    return path.absolute()


def _free(path: Path) -> str:
    with suppress(OSError, StopIteration):
        folder = next(folder for folder in path.parents if folder.is_dir())
        return f", and {shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there"
    return ""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore interrupts inside of the `with` block.

    Use it only after an interrupt or an error, and for a few seconds at most.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
