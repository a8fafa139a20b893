"""Runs a function in a fork of this process: what it imports and holds in memory ends with it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]


def in_a_fork(function: Callable[[Say], T], *, heard: Say) -> T:
    """What `function` returns, which is picklable. It may use all that this process holds, and changes none of it.

    What it says of its progress, by the callable that it is given, is `heard` here. Raises what it raises, with the
    traceback as a note; ChildProcessError where it ends without an answer. Ctrl-C here ends it. For a process that has
    not used torch: a fork of one that has may hang in its thread pools.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of a kernel hold no lock that is taken here
        pid = os.fork()
    if not pid:
        os.close(reader)
        _answer(function, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            while (answer := _next(stream)) is not None and answer[0] == "said":
                heard(answer[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    _, status = os.waitpid(pid, 0)
    if answer is None:
        raise ChildProcessError(f"a process of its own ended without an answer: {_how(status)}")
    kind, value = answer
    if kind == "failed":
        raise value
    return value  # type: ignore[no-any-return]


def _next(stream: BinaryIO) -> tuple[str, Any] | None:
    """("said" | "failed" | "done", value); None behind the last one."""
    try:
        found: tuple[str, Any] = pickle.load(stream)
    except EOFError:
        return None
    return found


def _answer(function: Callable[[Say], object], writer: int) -> None:
    """In the fork. Never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits ends this process
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a kernel's own are threads, which a fork lacks
        with os.fdopen(writer, "wb", buffering=0) as stream:
            try:
                packed = pickle.dumps(("done", function(lambda text: pickle.dump(("said", text), stream))))
            except BaseException as error:
                error.add_note("".join(traceback.format_tb(error.__traceback__)[1:]).rstrip())
                try:
                    packed = pickle.dumps(("failed", error))
                except Exception:
                    packed = pickle.dumps(("failed", RuntimeError(f"{type(error).__name__}: {error}")))
            with os.fdopen(os.dup(writer), "wb") as whole:  # which writes all of it, however much a pipe takes at once
                whole.write(packed)
    finally:
        os._exit(0)


def _how(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
