"""Check that nbkit supports this machine. Used by `nbkit doctor` and before a cluster starts.

torch's version comes from the installed metadata, because importing torch costs seconds and memory in the kernel.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from nbkit.errors import ClusterError

PYTHON_AT_LEAST = (3, 11)
TORCH_AT_LEAST = (2, 11)
INSTALL_TORCH = (
    "pip install torch   (without an NVIDIA GPU the CPU build is enough and gigabytes smaller: add --index-url and "
    'the address that PyTorch\'s own install page shows for "Compute Platform: CPU"); then restart the kernel'
)


def check_platform(
    *,
    system: str = sys.platform,
    python: tuple[int, ...] = tuple(sys.version_info[:3]),
    torch: str | None = None,
) -> None:
    """Raise ClusterError unless this is Linux or macOS, Python >= 3.11 and torch >= 2.11.

    The arguments replace this machine's values in tests. torch: "" means that it is not installed.
    """
    if system not in ("linux", "darwin"):
        raise ClusterError(
            "nbkit runs on Linux, and on macOS with CPU ranks.",
            numbers=f"this is {system}",
            hint="On Windows, install Linux beside it (wsl --install) and start Jupyter there",
        )
    if python < PYTHON_AT_LEAST:
        raise ClusterError(
            "This Python is too old for nbkit.",
            numbers=f"Python {_dotted(python)}, needed >= {_dotted(PYTHON_AT_LEAST)}",
            hint=f"Make an environment with a newer one: python{_dotted(PYTHON_AT_LEAST)} -m venv .venv",
        )
    installed = torch_version() if torch is None else torch
    if not installed:
        raise ClusterError(
            "PyTorch is not installed in this environment.",
            numbers=f"torch >= {_dotted(TORCH_AT_LEAST)} is needed; {sys.executable} has none",
            hint=INSTALL_TORCH,
        )
    if release(installed) < TORCH_AT_LEAST:
        raise ClusterError(
            "This PyTorch is too old for nbkit.",
            numbers=f"torch {installed}, needed >= {_dotted(TORCH_AT_LEAST)}",
            hint=f'pip install --upgrade "torch>={_dotted(TORCH_AT_LEAST)}", then restart the kernel',
        )


def torch_version() -> str:
    """Return the installed torch's version ("2.13.0+cpu") from its metadata, "" if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def starts_by_forking(system: str = sys.platform) -> bool:
    """Return True if ranks are forked from one parent (Linux).

    On macOS they are spawned, because its system libraries do not survive a fork.
    """
    return system == "linux"


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
