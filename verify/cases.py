"""The cases: a model, a strategy or a chain of switches, and extras such as dropout."""

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
EXPERTS = ("ep=4", "ep=2", "zero1 ep=4", "zero3 ep=2", "tp=2 ep=2", "pp=2 ep=2")
MIXTURES = ("moe_by_hand", "mixtral")
PARITY_MODELS = ("gpt", "gpt2", "llama_of_8_heads", "llama_of_8_heads_tied", "encoder")
_EIGHT_STAGES = FAMILIES["pipeline"][2:]

EXTRAS = ("dropout", "clip", "accumulate", "tied", "ragged", "mask", "recompute")
"""dropout: of 0.1. clip: to a norm that gradients exceed. accumulate: micro-batches of two rows without a pipeline.
tied: embedding and head share weights. ragged: the last batch has three rows. mask: the loss is (sum, weight), and a
model that takes a mask gets padding. recompute: activations are computed again."""

ZOO_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2", "cp=2", "dp=2 tp=2")
"""One strategy of each family, on two ranks, and a product of two, on four."""

CHAIN = ("ddp", "zero3", "tp=2", "pp=2", "cp=2", "zero2")
"""One training switches through these, with one step in each. It goes on without those that are refused."""

CHAINED = " > ".join(CHAIN)
ZOO_STEPS, LONGEST = 3, len(CHAIN)

ZOO_MIXTURES = ("moe_by_hand", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
EXPERTS_CHAINED = "ddp > ep=4 > zero3 ep=2 > tp=2 ep=2 > pp=2 ep=2 > zero3"
ZOO_EXPERTS = ("ep=4", "ep=2", "zero3 ep=2", "tp=2 ep=2", "pp=2 ep=2", "cp=2 ep=2", EXPERTS_CHAINED)
"""The mixtures of the zoo also train under these, on four ranks: experts along each axis, and into ep and out of it."""

OPTIMIZER_STRATEGIES = {
    **dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2", "cp=2", CHAINED), 2),
    **dict.fromkeys(("dp=4 zero=3 shard=2", "dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2", "zero=3 dp=2 tp=2"), 4),
}
"""Each optimizer trains under these, and in the chain. By strategy, the number of ranks."""


@dataclass(frozen=True)
class Case:
    """A training that is compared with one process.

    model: a name in `verify.training.MODELS`, or a model that is not there. strategy: one, or several with " > "
    between them, to switch to. dtype: of the weights. layers: of the model, if their number can be chosen; a stage
    takes one at least. extras: any of EXTRAS, and "bf16": forward and loss under autocast; "selective": recompute
    only a part of each block; "sgd": SGD with momentum, whose weights can be compared, instead of AdamW, and data in
    its own order; "evaluate": on all data at the end.
    optimizer: a name in `verify.optimizers.OPTIMIZERS`, instead of SGD.
    """

    model: str | Specimen
    strategy: str
    dtype: str = "float64"
    steps: int = 3
    extras: frozenset[str] = frozenset()
    layers: int | None = None
    ranks: int = 4
    optimizer: str = ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies, in order."""
        return tuple(self.strategy.split(" > "))

    @property
    def truth(self) -> Case:
        """Return the case that one process trains. It keeps the extras that change the result."""
        extras = self.extras - {"accumulate", "recompute", "selective", "tied"}
        steps = LONGEST if "sgd" in extras else self.steps
        return replace(self, strategy="", extras=extras, steps=steps, ranks=1)

    def __str__(self) -> str:
        if "sgd" in self.extras:
            return f"{self.optimizer or self.model}, {self.strategy}"
        words = [self.model, self.strategy, self.dtype, f"{self.steps} steps", *sorted(self.extras)]
        return ", ".join(word for word in words if word)


def parity_case(model: str, strategy: str, dtype: str = "float64", steps: int = 3, extras: Iterable[str] = ()) -> Case:
    """Return a case with the ranks and layers that the strategy needs: eight stages need eight layers."""
    ranks = 5 if "pp=5" in strategy else 8 if strategy.count("=2") == 3 else 4
    return Case(model, strategy, dtype, steps, frozenset(extras), 8 if strategy in _EIGHT_STAGES else None, ranks)


def parity_matrix(dtype: str, steps: int) -> Iterator[Case]:
    """Yield every strategy on every model, and those with expert parallelism on two mixtures. The convolutions have no
    heads and positions, and get four strategies."""
    for model in PARITY_MODELS:
        for strategies in FAMILIES.values():
            for strategy in strategies:
                yield parity_case(model, strategy, dtype, steps)
    for strategy in ("ddp", "zero3", "pp=5 microbatches=8", "dp=2 pp=2"):
        yield parity_case("ten_convs", strategy, dtype, steps)
    for model in MIXTURES:
        for strategy in EXPERTS:
            yield parity_case(model, strategy, dtype, steps)


def parity_extras(dtype: str, steps: int) -> Iterator[Case]:
    """Yield each extra once in every family, on different models."""
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
                # Cases whose `truth` is equal share one run: `recompute` and `accumulate` change nothing there.
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
    """Yield one or two strategies of each family on two models, with float32 weights and bfloat16 arithmetic."""
    chosen = [FAMILIES["data"][0], FAMILIES["data"][3], "tp", "pp schedule=1f1b", "pp schedule=zbv", "cp=4"]
    for model in ("gpt", "llama_of_8_heads"):
        for strategy in (*chosen, "dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2"):
            yield parity_case(model, strategy, "float32", steps, {"bf16"})


def zoo_case(model: str, strategy: str) -> Case:
    """Return the case of one strategy for some steps, or of a chain with a step in each."""
    chain = strategy.split(" > ")
    steps = ZOO_STEPS if len(chain) == 1 else len(chain)
    return Case(model, strategy, steps=steps, extras=frozenset({"sgd"}), ranks=max(map(zoo_ranks, chain)))


def zoo_ranks(strategy: str) -> int:
    """Return the number of ranks of a strategy of the zoo."""
    return 4 if "ep=" in strategy else 2 ** max(1, strategy.count("=2"))


def zoo_cases(models: Sequence[str], words: Sequence[str] = ()) -> Iterator[Case]:
    """Yield every model under every strategy and in the chain, and mixtures under those with expert parallelism.

    With words: only the cases that have all of them.

    A word is a model, a strategy, an axis of it, or "chain".
    """
    for model in models:
        for strategy in (*ZOO_STRATEGIES, CHAINED, *(ZOO_EXPERTS if model in ZOO_MIXTURES else ())):
            if all(word in (model, strategy, *_words_of(strategy)) for word in words):
                yield zoo_case(model, strategy)


def optimizer_cases(optimizers: Sequence[str], words: Sequence[str] = ()) -> Iterator[Case]:
    """Yield every optimizer under every strategy, six steps each. With words: only the cases that have all of them.

    A word is an optimizer, a strategy or an axis of it, or "chain".
    """
    for name in optimizers:
        for strategy, ranks in OPTIMIZER_STRATEGIES.items():
            if all(word in (name, *_words_of(strategy)) for word in words):
                extras = frozenset({"sgd"})
                yield Case("gpt_no_key_bias", strategy, "float64", LONGEST, extras, 2, ranks, optimizer=name)


def _words_of(strategy: str) -> tuple[str, ...]:
    """Return the words that select the cases of a strategy."""
    if " > " in strategy:
        return ("chain", "ep") if "ep=" in strategy else ("chain",)
    return strategy, *(each.split("=")[0] for each in strategy.split())
