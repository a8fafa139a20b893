"""Bytes that a rank holds at rest: at the end of a step, with gradients, without activations.

Per trained element, over a sharding group of N ranks, with p bytes of parameter, g of gradient, o of optimizer state
(Adam in fp32: 4, 4, 8; mixed precision with fp32 master weights: 2, 2, 12), after ZeRO (Rajbhandari et al. 2020, table
1 and section 5):

    zero=0   p + g + o        16
    zero=1   p + g + o/N      8 + 8/N
    zero=2   p + (g + o)/N    4 + 12/N
    zero=3   (p + g + o)/N    16/N

The pipeline takes away what other stages hold, tensor parallelism divides what it cuts (Shoeybi et al. 2019; norms and
some biases stay whole), context parallelism changes nothing. A frozen element has p alone. Left out: the step counters
of an optimizer (4 bytes per parameter tensor), buffers, and the padding of collectives, which is gone at rest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """Bytes of one element: of the parameter, its gradient, its optimizer state (with a master copy where one is)."""

    parameter: int
    gradient: int
    optimizer: int


ADAM = Bytes(4, 4, 8)


@dataclass(frozen=True)
class Rest:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer
