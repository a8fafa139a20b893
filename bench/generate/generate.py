"""Tokens of a Hugging Face model with a cache of keys and values, and of four texts at once in a pipeline of four."""

from __future__ import annotations

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.table import Row, compared

ROUNDS = 15
TOKENS, PIPELINE_TOKENS = 48, 16
RANKS = 4
STAGE_SECONDS = 0.04
BAR, BAR_PIPELINE = 1 / 0.9, 1 / 3


def run(settings: Settings) -> list[Row]:
    """Two rows; CPU-seconds stand beside the first, since a busy machine stretches the others."""
    rounds = settings.count(ROUNDS)
    found: dict[str, list[tuple[float, float]]] = {"nbkit": [], "hugging face": [], "again": []}
    with Ranks("generate.generate_ranks", 1, folder=settings.folder) as ranks:
        ranks.ask("load")
        for _ in range(rounds):
            for arm, measured in found.items():
                measured.append(ranks.ask("alone", plain=arm == "hugging face", tokens=TOKENS)[0])
    at_once: list[float] = []
    one_by_one: list[float] = []
    with Ranks("generate.generate_ranks", RANKS, folder=settings.folder) as ranks:
        ranks.ask("sleep", seconds=STAGE_SECONDS)
        for _ in range(rounds):
            at_once.append(max(ranks.ask("texts", at_once=True, tokens=PIPELINE_TOKENS)))
            one_by_one.append(max(ranks.ask("texts", at_once=False, tokens=PIPELINE_TOKENS)))
    ours, theirs, again = ([wall for wall, _ in found[arm]] for arm in ("nbkit", "hugging face", "again"))
    cpu = sum(busy for _, busy in found["nbkit"]) / sum(busy for _, busy in found["hugging face"])
    return [
        compared(
            f"generate, {TOKENS} tokens of a GPT-2 with a cache, one rank",
            *(ours, "Hugging Face", theirs, again, BAR, "ms"),
            note=f"; CPU-seconds {cpu:.2f} x",
        ),
        compared(
            f"generate, {RANKS} texts at once, pp={RANKS}, stages that sleep",
            *(at_once, "one at a time", one_by_one, None, BAR_PIPELINE, "ms"),
        ),
    ]
