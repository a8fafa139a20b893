"""Sinks that hand the events of a training to a file or to a tracker: loss, lr, throughput, memory, switches.

    trainer = nbkit.Trainer(..., sinks=[nbkit.sinks.CSV("runs/loss.csv"), nbkit.sinks.WandB(project="gpt")])

`nbkit.prepare` takes them too. They are called on rank 0, in a thread, so no step waits for them. See
docs/reference/own-sinks.md for a sink of your own. Like nbkit itself, this package imports a sink only when it is
used. A tracker is imported when its run begins.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"CSV": "csv", "MLflow": "mlflow", "Trackio": "trackio", "WandB": "wandb"}

__all__ = ["CSV", "MLflow", "Trackio", "WandB"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nbkit.sinks' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f"nbkit.sinks.{_HOME[name]}"), name)
