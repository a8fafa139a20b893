"""The public part of a bug report about this machine: versions, environment, and the output of `nbkit doctor`.

`nbkit doctor --report` prints it, and `nbkit selftest` ends its report with it.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterator, Sequence
from importlib import metadata

import nbkit
from nbkit.notebook.doctor import DoctorReport
from nbkit.quoting import user_path

_PACKAGES = (
    *("torch", "ipyparallel", "ipykernel", "IPython", "jupyter_client", "numpy", "psutil"),
    *("jupyterlab", "notebook", "ipywidgets", "anywidget", "tensorboard", "transformers", "accelerate"),
)
_TELLING = ("TORCH", "PYTORCH", "NCCL", "CUDA")
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|AUTH", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")


def bug_report(found: DoctorReport) -> str:
    """Return versions, environment and findings as Markdown, without secrets."""
    parts = (("Versions", _versions()), ("Environment", _environment()), ("nbkit doctor", str(found)))
    return without_secrets("\n\n".join(f"## {title}\n\n{block(text)}" for title, text in parts))


def block(text: str) -> str:
    """Return `text` as a code block of Markdown."""
    # Four backticks, in case the text contains a fence.
    return f"````text\n{text.strip() or '(nothing)'}\n````"


def without_secrets(text: str) -> str:
    """Return `text` without the paths of the home directory, the names of user and host, and passwords in addresses."""
    for secret, shown in _private():
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", shown, text)
    return _IN_ADDRESS.sub("...@", text)


def _private() -> Iterator[tuple[str, str]]:
    home = str(user_path("~"))
    places = sorted({home, os.path.realpath(home)}, key=len, reverse=True)
    yield from ((place, "~") for place in places if len(place) > 1)
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # the user has no name, as in some containers
        user = "root"
    if user != "root":
        yield user, "USER"
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]} - {"", "localhost"}
    yield from ((name, "HOST") for name in sorted(names, key=len, reverse=True))


def _versions() -> str:
    found = {"nbkit": nbkit.__version__, "Python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return _columns(list(found.items()))


def _environment() -> str:
    """Return the environment variables of torch, NCCL and CUDA, and no others."""
    rows = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)]
    return _columns([(name, "..." if _SECRET.search(name) else value) for name, value in rows])


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
