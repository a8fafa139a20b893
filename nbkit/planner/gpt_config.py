"""Sizes of nbkit's GPT. They are in a file of their own, so that a plan can be made without torch."""

from __future__ import annotations

from dataclasses import dataclass

from nbkit.errors import UsageError


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    vocab: the number of different tokens; 256 is one for each byte. block: the maximum length of a sequence. layers:
    the number of blocks. heads: the number of attention heads of a block; it must divide `width`. width: the number of
    features of a token. dropout: the share of elements that are set to zero during training.
    """

    vocab: int = 256
    block: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.vocab, self.block, self.layers, self.heads, self.width) < 1:
            raise UsageError("Every size of a GPT must be at least 1.", numbers=repr(self), hint="GPTConfig()")
        if self.width % self.heads:
            raise UsageError(
                "The width is not a multiple of the number of heads.",
                numbers=f"width {self.width} / heads {self.heads} = {self.width / self.heads:g}",
                hint=f"GPTConfig(width={self.width // self.heads * self.heads or self.heads}, heads={self.heads})",
            )
