"""Measure how fast tokens are generated: by a Hugging Face model with a cache of keys and values, and for four texts
at once in a pipeline of four ranks.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor

import nbkit
from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, data, token_loss, trainer
from bench.settings import Settings
from bench.table import Row, compared
from nbkit.rank.models.gpt import Block

ROUNDS = 15
TOKENS, PIPELINE_TOKENS = 48, 16
RANKS = 4
STAGE_SECONDS = 0.04
BAR, BAR_PIPELINE = 1 / 0.9, 1 / 3


def run(settings: Settings) -> list[Row]:
    """Return two rows. The first also shows CPU-seconds, because a busy machine makes wall seconds longer."""
    rounds = settings.count(ROUNDS)
    found: dict[str, list[tuple[float, float]]] = {"nbkit": [], "hugging face": [], "again": []}
    with Ranks("generate", 1, folder=settings.folder) as ranks:
        ranks.ask("load")
        for _ in range(rounds):
            for arm, measured in found.items():
                measured.append(ranks.ask("alone", plain=arm == "hugging face", tokens=TOKENS)[0])
    at_once: list[float] = []
    one_by_one: list[float] = []
    with Ranks("generate", RANKS, folder=settings.folder) as ranks:
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


PROMPT = torch.arange(1, 17)


class SlowBlock(Block):
    """A block that sleeps for `seconds` before its forward."""

    seconds = 0.0

    def forward(self, x: Tensor, **mask: Tensor) -> Tensor:
        time.sleep(SlowBlock.seconds)
        return super().forward(x, **mask)


class Worker:
    """A rank that generates tokens. Call `load` before `alone`, and `sleep` before `texts`."""

    def load(self) -> None:
        """Make a GPT-2 of 6 layers in a Trainer, and the same model in plain Hugging Face."""
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes: dict[str, Any] = {"n_layer": 6, "n_head": 8, "n_embd": 256, "n_positions": 256, "vocab_size": 4096}
        torch.manual_seed(0)
        made = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        self._plain: Any = GPT2LMHeadModel(made).eval()
        ids = [(row, row) for row in torch.randint(0, 4096, (8, 16))]
        self._trainer = trainer(
            config(256, 1),
            "ddp",
            batch=4,
            model=lambda: GPT2LMHeadModel(made),
            loss=lambda output, target: token_loss(output.logits, target),
            data=ids,
        )
        self._plain.load_state_dict(self._trainer.full_state_dict(), strict=False)
        self._plain.tie_weights()

    def alone(self, plain: bool, tokens: int) -> tuple[float, float]:
        """Generate `tokens` tokens and return (seconds, CPU-seconds). plain: with Hugging Face's own `generate`.

        Raises AssertionError if the tokens are not those of earlier calls.
        """
        began, busy = time.perf_counter(), time.process_time()
        if plain:
            how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
            with torch.no_grad():
                found = self._plain.generate(PROMPT[None], max_new_tokens=tokens, **how)[0]
        else:
            found = self._trainer.generate(PROMPT, tokens)
        took = time.perf_counter() - began, time.process_time() - busy
        assert len(found) == len(PROMPT) + tokens
        self._same(found.tolist())
        return took

    def _same(self, found: list[Any]) -> None:
        before = getattr(self, "_found", found)
        if before != found:
            raise AssertionError(f"other tokens: {found}, before: {before}")
        self._found = found

    def sleep(self, seconds: float) -> None:
        """Make a pipeline with one stage per rank. Each stage is a block that sleeps for `seconds`."""
        warnings.simplefilter("ignore")  # the warning that a GPT keeps no keys and values
        of = config(32, 4, heads=2)

        def build() -> nbkit.GPT:
            model = nbkit.GPT(of)
            for block in model.blocks:
                block.__class__ = SlowBlock
            return model

        self._trainer = trainer(of, "pp", batch=8, model=build, data=data(of, 64))
        self._trainer.generate([PROMPT] * 4, 1)
        SlowBlock.seconds = seconds

    def texts(self, at_once: bool, tokens: int) -> float:
        """Return the seconds that it takes to generate `tokens` tokens for each of four texts."""
        prompts = [PROMPT + i for i in range(4)]
        began = time.perf_counter()
        if at_once:
            found = self._trainer.generate(prompts, tokens)
        else:
            found = [self._trainer.generate(prompt, tokens) for prompt in prompts]
        took = time.perf_counter() - began
        self._same([text.tolist() for text in found])
        return took
