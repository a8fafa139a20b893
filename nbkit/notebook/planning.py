"""`nbkit.plan`: which strategy to choose for a model, on this machine, a cluster or hardware described in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbkit.errors import UsageError
from nbkit.planner.choose.hardware import Hardware
from nbkit.planner.choose.ranked_strategies import Plan, Words
from nbkit.planner.choose.search import search
from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.peak.gpt_pieces import GPTPieces

PRECISIONS = {None: 4, "bf16": 2, "fp16": 2}
"""Bytes of what is computed."""


def plan(model: Any, *, batch: int, on: str, precision: str | None = "bf16") -> Plan:
    """Every strategy that fits, the best first, with its memory at the peak, its seconds and what it sends.

    model: a GPTConfig; nothing is built, and torch is not needed. batch: rows of a global batch. on: hardware in a
    line, "128 x 8 H100". precision: as a Trainer has it. `.rows[0]` is the recommendation, `.refused` what does not
    fit, with the arithmetic. Raises UsageError for other models, hardware or numbers.
    """
    if not isinstance(model, GPTConfig):
        raise UsageError(
            f"A plan is made of a GPTConfig, and this is a {type(model).__name__}.",
            numbers="other models are measured on the ranks: strategy='auto' of the Trainer, and the panel",
            hint='nbkit.plan(nbkit.GPTConfig(width=768, layers=12, heads=12), batch=64, on="8 H100")',
        )
    if precision not in PRECISIONS:
        raise UsageError(
            f"There is no precision {precision!r}.", numbers="None, 'bf16', 'fp16'", hint="precision='bf16'"
        )
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError("A batch has at least one row.", numbers=f"batch={batch!r}", hint="batch=64")
    return search(GPTPieces(model, element=PRECISIONS[precision]), batch, Hardware.parse(on))


def explain(model: Any, first: str, second: str, *, batch: int, on: str, precision: str | None = "bf16") -> Words:
    """What two rows of a plan differ in, and what would be chosen with more devices, a faster network, more rows."""
    made, hardware = plan(model, batch=batch, on=on, precision=precision), Hardware.parse(on)
    subject = GPTPieces(model, element=PRECISIONS[precision])
    faster = replace(hardware.device, far=2 * hardware.device.far)
    others = {
        "twice the devices": (batch, replace(hardware, nodes=2 * hardware.nodes)),
        "a network twice as fast": (batch, replace(hardware, device=faster)),
        "a batch twice as large": (2 * batch, hardware),
    }
    lines = [made.why(first, second).text, f"The first row is {made.rows[0].settings}. It would be"]
    for what, (rows, other) in others.items():
        found = search(subject, rows, other)
        lines.append(f"  with {what}: {found.rows[0].settings if found.rows else 'nothing that fits'}")
    return Words("\n".join(lines))


def planned(
    variables: Mapping[str, Any], *, model: str, batch: int, on: str, precision: str, why: list[str] | None
) -> Plan | Words:
    """What `%nbkit plan` shows. variables: of the notebook, one of which is the model."""
    if model not in variables:
        raise UsageError(
            f"The notebook has no variable {model!r}.",
            numbers="%nbkit plan takes the name of a GPTConfig",
            hint=f"{model} = nbkit.GPTConfig(width=768, layers=12, heads=12)",
        )
    asked = None if precision == "fp32" else precision
    if why is not None:
        return explain(variables[model], *why, batch=batch, on=on, precision=asked)
    return plan(variables[model], batch=batch, on=on, precision=asked)
