"""The names of all TensorBoard tags. Code that writes or reads a tag takes it from here.

Tags of the whole job are in the run's own directory: train/, eval/, speed/ and logged/. Tags of one rank are in a
directory below it (rank0, rank1, ...): step/, experts/, communication/ and memory/.
"""

from __future__ import annotations

from typing import Any

LOSS = "train/loss"
EVAL_LOSS = "eval/loss"
GRAD_NORM = "train/grad_norm"
IMBALANCE = "train/expert_imbalance"
LR = "train/lr"
TOKENS_PER_SECOND = "speed/tokens_per_second"
SAMPLES_PER_SECOND = "speed/samples_per_second"
STEP_SECONDS = "speed/step_seconds"
MFU = "speed/mfu"
EVENTS = "events"

RANK_SECONDS = "step/seconds"
BUBBLE = "step/bubble_share"
MEASURING = "step/measuring_share"
EXPERTS = "experts/tokens"


def logged(name: str) -> str:
    """Return the tag of a number that the user logs under `name`."""
    return f"logged/{name}"


def part(name: str) -> str:
    """Return the tag of the seconds of a part of a step: compute, exposed, bubble, data, optimizer, other."""
    return f"step/{name}_seconds"


def expert(number: str) -> str:
    """Return the tag of the tokens that an expert of a rank computed in a step, in all layers."""
    return f"{EXPERTS}/{number}"


def moved(op: str, axis: str, what: str) -> str:
    """Return the tag of one operation on one axis in a step.

    what: bytes, calls, call_seconds, algbw, busbw (bytes/s), overlap.
    """
    return f"communication/{axis}/{op}/{what}"


def memory(name: str) -> str:
    """Return the tag of bytes of a rank: parameters, gradients, optimizer, buffers, now, peak."""
    return f"memory/{name}"


def layout() -> dict[str, Any]:
    """Return the first page of the tab "Custom Scalars": category -> title -> [kind, expressions for tags].

    TensorBoard draws a line for each matching tag and run, so one chart compares the ranks.
    """
    parts = "compute|exposed|bubble|data|optimizer|other"
    return {
        "At a glance": {
            "loss": ["Multiline", [f"^{LOSS}$", f"^{EVAL_LOSS}$"]],
            "tokens a second": ["Multiline", [f"^{TOKENS_PER_SECOND}$"]],
            "seconds of a step, by rank: the spread is the skew": ["Multiline", [f"^{RANK_SECONDS}$"]],
            "learning rate and gradient norm": ["Multiline", [f"^{LR}$", f"^{GRAD_NORM}$"]],
        },
        "Where a step goes": {
            "seconds of each part": ["Multiline", [f"^step/({parts})_seconds$"]],
            "share of the pipeline's bubble, and of measuring": ["Multiline", [f"^{BUBBLE}$", f"^{MEASURING}$"]],
        },
        "Communication": {
            "bytes that a rank hands over in a step": ["Multiline", ["^communication/.*/bytes$"]],
            "seconds of a call": ["Multiline", ["^communication/.*/call_seconds$"]],
            "bus bandwidth, bytes/s": ["Multiline", ["^communication/.*/busbw$"]],
        },
        "Experts": {
            "tokens that the experts of a rank compute": ["Multiline", [f"^{EXPERTS}$"]],
            "most tokens of a rank in each layer / mean of the ranks": ["Multiline", [f"^{IMBALANCE}$"]],
            "tokens of each expert": ["Multiline", [f"^{EXPERTS}/"]],
        },
        "Memory": {"bytes of a rank": ["Multiline", ["^memory/"]]},
    }
