"""The cases: a model, a strategy or a chain of switches, and extras."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from verify.models.specimens import Specimen

FAMILIES = {
    "data": ("ddp", "zero1", "zero2", "zero3", "hsdp"),
    "tensor": ("tp",),
    "pipeline": tuple(f"pp schedule={name}" for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")),
    "hybrid": ("dp=2 tp=2", "dp=2 pp=2", "zero=3 dp=2 tp=2", "tp=2 pp=2", "dp=2 tp=2 pp=2"),
    "context": ("cp=4", "dp=2 cp=2"),
}
PARITY_MODELS = ("gpt", "gpt2", "llama_of_8_heads", "llama_of_8_heads_tied", "encoder")
_EIGHT_STAGES = FAMILIES["pipeline"][2:]

EXTRAS = ("dropout", "clip", "accumulate", "tied", "ragged", "mask", "recompute")
"""dropout of 0.1; clipping to a norm that is exceeded; micro-batches of two rows where there is no pipeline; weights
shared between embedding and head; a last batch of three rows; a loss of (sum, weight), padding where the model takes a
mask; activations recomputed."""

ZOO_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2", "cp=2", "dp=2 tp=2")
"""One strategy of each family on two ranks, and a product of two on four."""

CHAIN = ("ddp", "zero3", "tp=2", "pp=2", "cp=2", "zero2")
"""A training makes one step under each of these. A strategy that is refused is left out, and it goes on."""

CHAINED = " > ".join(CHAIN)
ZOO_STEPS, LONGEST = 3, len(CHAIN)


@dataclass(frozen=True)
class Case:
    """A training to compare with one process.

    model: the name of one of `verify.training.MODELS`, or a Specimen. strategy: one, or several to switch to,
    with " > " between them. dtype: of the weights. layers: of the model, if it can have any number; a stage needs at
    least one. extras: of EXTRAS, and "bf16": forward and loss under autocast; "sgd": with momentum, whose weights show
    errors that AdamW hides, and with the data in order; "evaluate": on all data afterwards.
    """

    model: str | Specimen
    strategy: str
    dtype: str = "float64"
    steps: int = 3
    extras: frozenset[str] = frozenset()
    layers: int | None = None
    ranks: int = 4

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies, in order."""
        return tuple(self.strategy.split(" > "))

    @property
    def truth(self) -> Case:
        """The training of one process to compare with. It keeps the extras that change the result."""
        extras = self.extras - {"accumulate", "recompute", "tied"}
        steps = LONGEST if "sgd" in extras else self.steps
        return replace(self, strategy="", extras=extras, steps=steps, ranks=1)

    def __str__(self) -> str:
        if "sgd" in self.extras:
            return f"{self.model}, {self.strategy}"
        words = [self.model, self.strategy, self.dtype, f"{self.steps} steps", *sorted(self.extras)]
        return ", ".join(word for word in words if word)


def parity_case(model: str, strategy: str, dtype: str = "float64", steps: int = 3, extras: Iterable[str] = ()) -> Case:
    """Return a case with as many ranks and layers as the strategy needs: eight stages want eight layers."""
    ranks = 5 if "pp=5" in strategy else 8 if strategy.count("=2") == 3 else 4
    return Case(model, strategy, dtype, steps, frozenset(extras), 8 if strategy in _EIGHT_STAGES else None, ranks)


def parity_matrix(dtype: str, steps: int) -> Iterator[Case]:
    """Yield a case for every strategy on every model.

    The convolutions have no heads and no positions, so they get only strategies that split neither.
    """
    for model in PARITY_MODELS:
        for strategies in FAMILIES.values():
            for strategy in strategies:
                yield parity_case(model, strategy, dtype, steps)
    for strategy in ("ddp", "zero3", "pp=5 microbatches=8", "dp=2 pp=2"):
        yield parity_case("ten_convs", strategy, dtype, steps)


def parity_extras(dtype: str, steps: int) -> Iterator[Case]:
    """Yield a case for each extra in every family, on models that differ."""
    strategies = {
        "data": ("zero3", "ddp", "zero1", "zero2", "hsdp", "zero3", "zero3"),
        "tensor": ("tp",) * 7,
        "pipeline": tuple(FAMILIES["pipeline"][i] for i in (4, 3, 0, 1, 5, 2, 4)),
        "hybrid": ("tp=2 pp=2", "zero=3 dp=2 tp=2", "dp=2 tp=2", "dp=2 pp=2", "dp=2 pp=2", "dp=2 tp=2", "dp=2 pp=2"),
        "context": ("cp=4", "cp=2 zero=3", "dp=2 cp=2", "cp=2 tp=2", "dp=2 cp=2", "cp=4", "cp=2 pp=2"),
    }
    for family, chosen in strategies.items():
        for extra, strategy in zip(EXTRAS, chosen, strict=True):
            for model in _models(family, extra):
                # In one process, accumulate and recompute change nothing, so these cases share a truth.
                yield parity_case(model, strategy, dtype, max(steps, 4), {extra})


def _models(family: str, extra: str) -> tuple[str, ...]:
    if extra == "dropout":
        return ("gpt", "gpt2", "llama_of_8_heads", "encoder")
    if extra == "tied":
        return ("gpt_tied", "gpt2", "llama_of_8_heads_tied")
    if extra == "mask":
        convs = ("ten_convs",) if family in ("data", "pipeline") else ()
        return ("gpt", "gpt2", "llama_of_8_heads_tied", "encoder", *convs)
    return ("gpt", "llama_of_8_heads")


def bf16_cases(steps: int) -> Iterator[Case]:
    """Yield a case for one or two strategies of each family, on two models: float32 weights, bfloat16 arithmetic."""
    chosen = [FAMILIES["data"][0], FAMILIES["data"][3], "tp", "pp schedule=1f1b", "pp schedule=zbv", "cp=4"]
    for model in ("gpt", "llama_of_8_heads"):
        for strategy in (*chosen, "dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2"):
            yield parity_case(model, strategy, "float32", steps, {"bf16"})


def zoo_case(model: str, strategy: str) -> Case:
    """Return a case with some steps under one strategy, or with one step under each strategy of a chain."""
    chain = strategy.split(" > ")
    steps = ZOO_STEPS if len(chain) == 1 else len(chain)
    return Case(model, strategy, steps=steps, extras=frozenset({"sgd"}), ranks=max(map(zoo_ranks, chain)))


def zoo_ranks(strategy: str) -> int:
    """Return the number of ranks of a strategy of the zoo."""
    return 2 ** max(1, strategy.count("=2"))


def zoo_cases(models: Sequence[str], words: Sequence[str] = ()) -> Iterator[Case]:
    """Yield every model under every strategy and in the chain; with words, only the cases that match all of them.

    A word is a model, a strategy, an axis of it, or "chain".
    """
    for model in models:
        for strategy in (*ZOO_STRATEGIES, CHAINED):
            kinds = (
                ("chain",) if strategy == CHAINED else (strategy, *(each.split("=")[0] for each in strategy.split()))
            )
            if all(word in (model, strategy, *kinds) for word in words):
                yield zoo_case(model, strategy)
