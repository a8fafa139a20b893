"""The matrix: which model is trained under which strategy, with what besides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

FAMILIES = {
    "data": ("ddp", "zero1", "zero2", "zero3", "hsdp"),
    "tensor": ("tp",),
    "pipeline": tuple(f"pp schedule={name}" for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")),
    "hybrid": ("dp=2 tp=2", "dp=2 pp=2", "zero=3 dp=2 tp=2", "tp=2 pp=2", "dp=2 tp=2 pp=2"),
    "context": ("cp=4", "dp=2 cp=2"),
}
MODELS = ("gpt", "gpt2", "llama", "llama_tied", "encoder")
_EIGHT_STAGES = FAMILIES["pipeline"][2:]

EXTRAS = ("dropout", "clip", "accumulate", "tied", "ragged", "mask", "recompute")
"""dropout of 0.1; clipping to a norm that is exceeded; micro-batches of two rows where there is no pipeline; weights
shared between embedding and head; a last batch of three rows; a loss of (sum, weight), padding where the model takes a
mask; activations recomputed."""


@dataclass(frozen=True)
class Cell:
    """One training to compare. dtype: of the weights; bf16 among the extras: forward and loss under autocast.

    layers: of the model, where it has any number of them; a stage takes one at least.
    """

    subject: str
    strategy: str
    dtype: str = "float64"
    steps: int = 3
    extras: frozenset[str] = frozenset()
    layers: int = 4

    @property
    def ranks(self) -> int:
        """How many it takes."""
        if "pp=5" in self.strategy:
            return 5
        return 8 if self.strategy.count("=2") == 3 else 4

    @property
    def truth(self) -> Cell:
        """What one process trains to compare with: of its extras those that change the result."""
        return replace(self, strategy="", extras=self.extras - {"accumulate", "recompute", "tied"})

    def __str__(self) -> str:
        words = [self.subject, self.strategy, self.dtype, f"{self.steps} steps", *sorted(self.extras)]
        return ", ".join(word for word in words if word)


def matrix(dtype: str, steps: int) -> Iterator[Cell]:
    """Every strategy on every model; the convolutions, which have no heads and no positions, on those that apply: in
    five stages of two, for one.
    """
    for subject in MODELS:
        for strategies in FAMILIES.values():
            for strategy in strategies:
                yield Cell(subject, strategy, dtype, steps, layers=layers_for(strategy))
    for strategy in ("ddp", "zero3", "pp=5 microbatches=8", "dp=2 pp=2"):
        yield Cell("ten_convs", strategy, dtype, steps)


def layers_for(strategy: str) -> int:
    """Two stages on each of four ranks want eight; to all else more than four show nothing more."""
    return 8 if strategy in _EIGHT_STAGES else 4


def extra_cells(dtype: str, steps: int) -> Iterator[Cell]:
    """Each extra once in every family, on models that differ."""
    strategies = {
        "data": ("zero3", "ddp", "zero1", "zero2", "hsdp", "zero3", "zero3"),
        "tensor": ("tp",) * 7,
        "pipeline": tuple(FAMILIES["pipeline"][i] for i in (4, 3, 0, 1, 5, 2, 4)),
        "hybrid": ("tp=2 pp=2", "zero=3 dp=2 tp=2", "dp=2 tp=2", "dp=2 pp=2", "dp=2 pp=2", "dp=2 tp=2", "dp=2 pp=2"),
        "context": ("cp=4", "cp=2 zero=3", "dp=2 cp=2", "cp=2 tp=2", "dp=2 cp=2", "cp=4", "cp=2 pp=2"),
    }
    for family, chosen in strategies.items():
        for extra, strategy in zip(EXTRAS, chosen, strict=True):
            for subject in _subjects(family, extra):
                # One process recomputes nothing and accumulates nothing; there, several at a time save a truth.
                yield Cell(subject, strategy, dtype, max(steps, 4), frozenset({extra}), layers_for(strategy))


def _subjects(family: str, extra: str) -> tuple[str, ...]:
    if extra == "dropout":
        return ("gpt", "gpt2", "llama", "encoder")
    if extra == "tied":
        return ("gpt_tied", "gpt2", "llama_tied")
    if extra == "mask":
        return ("gpt", "gpt2", "llama_tied", "encoder", *(("ten_convs",) if family in ("data", "pipeline") else ()))
    return ("gpt", "llama")
