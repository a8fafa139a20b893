"""nbkit: run a distributed PyTorch training from a Jupyter notebook.

The root is lazy (PEP 562). Importing any submodule runs this file, but the notebook process must not import
torch, and a rank must not import Jupyter. So nothing is imported here until its name is used.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from nbkit.name_clash import REMEDY, other_nbkit

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
    "listen": "nbkit.rank.listen",
    "read_run": "nbkit.notebook.run.reader",
    "StrategyPanel": "nbkit.notebook.widgets.panel.panel",
    "Trainer": "nbkit.rank.train.trainer",
    "WeightAverage": "nbkit.rank.train.step.weight_average",
    "from_pretrained": "nbkit.rank.models.pretrained",
    "plan": "nbkit.notebook.planning",
    "prepare": "nbkit.rank.train.job",
    "check": "nbkit.rank.parallel.check_model",
    "GPT": "nbkit.rank.models.gpt",
    "GPTConfig": "nbkit.planner.gpt_config",
    "TextDataset": "nbkit.rank.models.text",
    **dict.fromkeys(("Checkpoints", "Compute", "Loading", "ModelHints", "Recovery"), "nbkit.trainer_options"),
}

_MODULES = ("lesson", "schedules", "sinks", "techniques")

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
    """Run on `%load_ext nbkit`: register the magics with the shell.

    A wheel has them as `nbkit.magics`, where they hide no other package named magics. A checkout has them in its folder
    `magics/`. Raises NbkitError if they are not there.
    """
    from nbkit.errors import NbkitError

    name = "nbkit.magics" if (_FOLDER / "magics").is_dir() else "magics"
    try:
        magics = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        where, what = str(_FOLDER.parent), "nbkit's magics are not there."
    else:
        where, what = str(magics.__file__), "Another package named magics hides nbkit's."
        if Path(where).parent.parent in (_FOLDER, _FOLDER.parent):
            magics.load_ipython_extension(shell)
            return
    raise NbkitError(what, numbers=where, hint="pip install .   (in the checkout), then restart the kernel")


_FOLDER = Path(__file__).resolve().parent
if _clash := other_nbkit(_FOLDER.parent):
    warnings.warn(f"{_clash} Keep one of them: {REMEDY}", stacklevel=2)
