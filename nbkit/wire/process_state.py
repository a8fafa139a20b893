"""The state of a process that does not answer: what the system says about it, and the stack that it dumps.

While a thread holds the interpreter, no other Python code of its process can run. faulthandler answers even then: its
signal handler is C code that appends the stack of the main thread to a file. See `failure_alarm.dump_on_signal`.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbkit.wire.processes import Process

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_HEAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack \(most recent call first\)):$")
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Frame:
    """A frame of a stack, as faulthandler prints it."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class ProcessState:
    """The state of a process, seen from outside.

    stopped: True if a signal or a debugger has stopped it. state: the system's word for its state. kernel: the kernel
    function in which it sleeps. stack: the stack of the main thread, innermost first; () if it was not dumped.
    """

    stopped: bool
    state: str
    kernel: str = ""
    stack: tuple[Frame, ...] = ()


def look(process: Process, log: Path, seconds: float = 1.0) -> ProcessState | None:
    """Return the state of a process of this host that dumps its stack into `log` on SIGUSR1.

    Returns None if it has ended, or is not on this host. A stopped process cannot dump its stack. seconds: the time to
    wait for the stack.
    """
    if not process.is_alive():
        return None
    try:
        state = psutil.Process(process.pid).status()
    except psutil.Error:
        return None
    stopped = state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    try:
        kernel = Path(f"/proc/{process.pid}/wchan").read_text().strip("0\n")
    except OSError:
        kernel = ""
    return ProcessState(stopped, state, kernel, () if stopped else _main_stack(process, log, seconds))


def _main_stack(process: Process, log: Path, seconds: float) -> tuple[Frame, ...]:
    try:
        before = log.stat().st_size
    except OSError:  # the process has not installed the handler yet, so the signal would end it
        return ()
    process.end(signal.SIGUSR1)
    deadline, text = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        with log.open(errors="replace") as file:
            file.seek(before)
            earlier, text = text, file.read()
        if text and text == earlier:  # the dump is complete
            break
    return main_thread_of(text)


def main_thread_of(dump: str) -> tuple[Frame, ...]:
    """Return the frames of the last stack in a dump of faulthandler, innermost first."""
    frames: list[Frame] = []
    for line in dump.splitlines():
        if _HEAD.match(line):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(Frame(found[1], int(found[2]), found[3]))
    return tuple(frames)
