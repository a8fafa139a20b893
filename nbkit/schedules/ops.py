"""One operation of a pipeline schedule, and which operation has to come before which."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Op(NamedTuple):
    """What is done with one micro-batch at one stage.

    kind: F forward, B whole backward, I gradient of the stage's input, W gradients of its weights (B = I then W).
    """

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


def before(op: Op, num_stages: int, *, split: bool) -> tuple[Op, ...]:
    """What must be done before `op`. split: whether the stage after this one has I and W instead of B."""
    kind, stage, micro = op
    if kind == "F":
        return (Op("F", stage - 1, micro),) if stage else ()
    if kind == "W":
        return (Op("I", stage, micro),)
    own = Op("F", stage, micro)
    return (own,) if stage == num_stages - 1 else (own, Op("I" if split else "B", stage + 1, micro))
