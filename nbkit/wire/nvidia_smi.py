"""Run nvidia-smi and read its csv answers, without CUDA and torch. The notebook and the ranks use this."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

CSV = "--format=csv,noheader,nounits"
# In WSL, and in containers on Kubernetes, nvidia-smi is often here and not on PATH.
_ELSEWHERE = ("/usr/lib/wsl/lib/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def find() -> str | None:
    """Return the path of nvidia-smi; None if it is not installed."""
    return shutil.which("nvidia-smi") or next((path for path in _ELSEWHERE if os.access(path, os.X_OK)), None)


_END_SECONDS = 1.0


def ask(smi: str, *questions: Sequence[str], seconds: float = 60.0) -> list[str]:
    """Return nvidia-smi's answers. Each question is its arguments for one run; all run at the same time.

    Without persistence mode each run has to wake every GPU. An answer is "" if the driver sees no GPU. Raises OSError,
    subprocess.TimeoutExpired if one run takes longer than `seconds`, or subprocess.SubprocessError with nvidia-smi's
    own error.
    """
    running = [
        subprocess.Popen([smi, *question], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for question in questions
    ]
    try:
        said = [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # with a broken driver, the process may not end
                    process.wait(_END_SECONDS)
    for process, (out, err) in zip(running, said, strict=True):
        # Exit code 6: the driver works, but sees no GPU.
        if process.returncode not in (0, 6):
            complaint = (err.strip() or out.strip() or f"exit status {process.returncode}").splitlines()[0]
            raise subprocess.SubprocessError(complaint)
    return ["" if process.returncode else out for process, (out, _) in zip(running, said, strict=True)]


def rows(answer: str) -> list[list[str]]:
    """Return the cells of a csv answer."""
    # nvidia-smi never quotes, so a csv reader would trip over a quote in a process name.
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if "," in line]


def number(text: str) -> float | None:
    """Return the number at the beginning of a cell; None for a cell such as "[N/A]"."""
    found = _NUMBER.match(text.strip())
    return float(found[0]) if found else None
