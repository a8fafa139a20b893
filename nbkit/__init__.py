"""nbkit: a Jupyter notebook as the cockpit of a distributed PyTorch job.

The root is lazy (PEP 562). Importing any submodule runs this file, but the notebook process must not import
torch, and a rank must not import Jupyter. So nothing is imported here until its name is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Cluster": "nbkit.notebook.cluster.cluster",
    "GradientBucket": "nbkit.rank.parallel.data_parallel.ddp",
    "Launcher": "nbkit.notebook.cluster.hosts.launcher",
    "LauncherStatus": "nbkit.notebook.cluster.hosts.launcher",
    "Balanced": "nbkit.rank.data.balanced.balanced",
    "Board": "nbkit.notebook.board.board",
    "Dashboard": "nbkit.notebook.widgets.dashboard.dashboard",
    "export": "nbkit.notebook.export.export",
    "read_run": "nbkit.notebook.run.reader",
    "StrategyPanel": "nbkit.notebook.widgets.panel.panel",
    "Trainer": "nbkit.rank.train.trainer",
    "from_pretrained": "nbkit.rank.models.pretrained",
    "plan": "nbkit.notebook.planning",
    "prepare": "nbkit.rank.train.job",
    "check": "nbkit.rank.parallel.check_model",
    "GPT": "nbkit.rank.models.gpt",
    "GPTConfig": "nbkit.planner.gpt_config",
    "TextDataset": "nbkit.rank.models.text",
    **dict.fromkeys(("Checkpoints", "Compute", "Loading", "ModelHints", "Recovery"), "nbkit.trainer_options"),
}

_MODULES = ("lesson", "schedules", "techniques")

__all__ = [*sorted(_HOME), "load_ipython_extension", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"nbkit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'nbkit' has no attribute {name!r}; it offers {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(shell: Any) -> None:
    """Run on `%load_ext nbkit`: hand the shell to every entry point of the group `nbkit.ipython`."""
    from importlib.metadata import entry_points

    from nbkit.errors import NbkitError

    found = entry_points(group="nbkit.ipython")
    if not found:
        raise NbkitError(
            "nbkit's magics are not installed.",
            numbers="no entry point in the group 'nbkit.ipython'",
            hint="pip install -e .   (in the checkout), then restart the kernel",
        )
    for entry in found:
        entry.load()(shell)
