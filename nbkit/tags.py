"""The one spelling of every TensorBoard tag: whoever writes or reads one takes it from here."""

from __future__ import annotations

__all__ = ["EVAL_LOSS", "EVENTS", "GRAD_NORM", "LOSS", "LR", "STEP_SECONDS", "TOKENS_PER_SECOND", "logged"]

LOSS = "train/loss"
EVAL_LOSS = "eval/loss"
GRAD_NORM = "train/grad_norm"
LR = "train/lr"
TOKENS_PER_SECOND = "speed/tokens_per_second"
STEP_SECONDS = "speed/step_seconds"
EVENTS = "events"


def logged(name: str) -> str:
    """The tag of a number that the user logs under `name`."""
    return f"logged/{name}"
