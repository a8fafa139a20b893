"""Test that every strategy generates the tokens of Hugging Face or the plain model, for any number of texts."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.models import generate
from nbkit.rank.models.generate import KeyValueCache, Sampling, cache_argument
from nbkit.rank.train.trainer import Trainer
from verify.models.specimens import cross_entropy, hf_gpt2, hf_llama, next_tokens, object_cross_entropy

pytestmark = pytest.mark.usefixtures("rows_are_known")

PROMPTS = [torch.arange(3) + 1, torch.arange(5) + 2, torch.arange(3) + 4, torch.tensor([7])]
TOKENS = 4
# number of ranks -> model -> strategies
STRATEGIES = {
    2: {hf_gpt2: ("tp",), hf_llama: ("zero3", "cp=2", "pp=2 schedule=interleaved microbatches=4")},
    4: {hf_gpt2: ("pp=2 tp=2",), hf_llama: ("zero3", "cp=4", "dp=2 pp=2 schedule=interleaved microbatches=4")},
}


def build(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(4).double()  # type: ignore[no-any-return]


def trainer(model: Any, strategy: str, data: Any, **changed: Any) -> Trainer:
    return Trainer(
        model=model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), data=data, batch_size=8,
        log_dir=None, progress=False, strategy=strategy, **changed,
    )  # fmt: skip


def of_hugging_face(world: Any) -> dict[str, Any]:
    ids, target = next_tokens(16, torch.Generator().manual_seed(4))
    data = [({"input_ids": x}, y) for x, y in zip(ids, target, strict=True)]
    found: dict[str, Any] = {}
    for make, strategies in STRATEGIES[world.place.world_size].items():
        plain: Any = build(make).eval()
        how = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        found[make.__name__] = [plain.generate(p[None], **how)[0].tolist() for p in PROMPTS]
        job = trainer(lambda make=make: build(make), strategies[0], data, loss=object_cross_entropy)
        for strategy in strategies:
            if strategy != strategies[0]:
                job.switch(strategy)
            seen: list[int] = []
            watched = job.model.register_forward_pre_hook(lambda _, args, kwargs, seen=seen: seen.append(
                next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).shape[1]
            ), with_kwargs=True)  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                together = [text.tolist() for text in job.generate(PROMPTS, TOKENS)]
            watched.remove()
            drawn = job.generate(PROMPTS, TOKENS, temperature=0.9, top_k=5, seed=3)
            alone = job.generate(PROMPTS[1], TOKENS, temperature=0.9, top_k=5, seed=4)
            found[make.__name__, strategy] = together, [text.tolist() for text in drawn], alone.tolist(), max(seen)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_hugging_face_models_generate_the_same_tokens_as_without_nbkit(ranks: int) -> None:
    for of_rank in (every := run_ranks(of_hugging_face, ranks, timeout=240)):
        for make, strategies in STRATEGIES[ranks].items():
            first = every[0][make.__name__, strategies[0]]
            assert len({tuple(text[len(prompt) :]) for text, prompt in zip(first[0], PROMPTS, strict=True)}) > 1
            for strategy in strategies:
                greedy, drawn, alone, longest = of_rank[make.__name__, strategy]
                assert greedy == of_rank[make.__name__], strategy
                assert drawn == first[1] and drawn[1] == alone == first[2], strategy  # seed + i, whatever the others
                assert longest == 5, strategy  # the longest prompt: with a cache, no forward has more positions


def of_a_plain_model(world: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nbkit.GPT(nbkit.GPTConfig(vocab=256, block=12, layers=4, heads=2, width=16)).double()
    expected = [model.generate(text, 40, temperature=0) for text in ("def ", "a longer text", "x")]
    ids = torch.randint(0, 256, (16, 8), generator=torch.Generator().manual_seed(1))
    data = list(zip(ids, ids, strict=True))
    job = trainer(lambda: model, "pp=2 schedule=zbv microbatches=4", data, loss=cross_entropy)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        found = job.generate(["def ", "a longer text", "x"], 40)  # with several batches, and beyond the block
        assert not said  # short texts cost little
        for _ in range(2):
            job.generate("y", 100)
    rows = job.generate(torch.arange(6).view(2, 3), 2)
    return expected, found, [str(one.message) for one in said if "keys and values" in str(one.message)], rows.shape


@pytest.mark.long
def test_a_model_without_a_cache_generates_the_same_and_warns_once() -> None:
    for rank, (expected, found, said, shape) in enumerate(run_ranks(of_a_plain_model, 2)):
        assert found == expected
        assert len(said) == (rank == 0) and all("GPT cannot keep keys and values" in text for text in said)
        assert shape == (2, 5)


def wrong_caches() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    class Right(GPT2LMHeadModel):
        pass

    class FromZero(GPT2LMHeadModel):
        """A GPT-2 that counts positions from zero in each call."""

        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: Any = None) -> Any:  # type: ignore[override]
            places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            return super().forward(
                input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache, position_ids=places
            )

    class Rolling(GPT2LMHeadModel):
        """A GPT-2 that mixes the positions of a call outside of its attention too."""

        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: Any = None) -> Any:  # type: ignore[override]
            output = super().forward(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)
            output.logits = output.logits + output.logits.cumsum(1).roll(1, 1)
            return output

    class Failing(GPT2LMHeadModel):
        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: Any = None) -> Any:  # type: ignore[override]
            if past_key_values is not None:
                past_key_values.reorder_cache(None)
            return super().forward(input_ids=input_ids, use_cache=False)

    config = GPT2Config(vocab_size=32, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=None,
                        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return {kind.__name__: lambda kind=kind: kind(config) for kind in (Right, FromZero, Rolling, Failing)}


def with_wrong_caches(world: Any) -> dict[str, Any]:
    ids, target = next_tokens(16, torch.Generator().manual_seed(4))
    data = [({"input_ids": x}, y) for x, y in zip(ids, target, strict=True)]
    found: dict[str, Any] = {}
    for name, make in wrong_caches().items():
        torch.manual_seed(0)
        model = make()
        prompt, text = torch.arange(4) + 1, torch.arange(4) + 1
        with torch.no_grad():
            for _ in range(TOKENS):
                text = torch.cat([text, model.eval()(text[None]).logits[0, -1:].argmax(-1)])
        job = trainer(lambda model=model: model, "ddp", data, loss=object_cross_entropy)
        with warnings.catch_warnings(record=True) as said, patch.object(generate, "_COSTLY", 1):
            warnings.simplefilter("always")
            made = [job.generate(prompt, TOKENS).tolist() for _ in range(2)]
        found[name] = made == [text.tolist()] * 2, [str(one.message) for one in said if "keys" in str(one.message)]
    return found


def test_keys_and_values_are_cached_only_if_the_logits_stay_right() -> None:
    first, second = run_ranks(with_wrong_caches, 2, timeout=150)
    assert all(equal for rank in (first, second) for equal, _ in rank.values())
    assert first["Right"][1] == [] and all(said == [] for _, said in second.values())
    for name, why in (("FromZero", "logits"), ("Rolling", "logits"), ("Failing", "it fails: AttributeError")):
        assert len(first[name][1]) == 2 and all(why in text for text in first[name][1])


@pytest.mark.long
def test_a_sliding_window_masks_cached_keys_and_values() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=4, bos_token_id=None, eos_token_id=None,
        )
    ).double().eval()  # fmt: skip
    ids = torch.randint(0, 32, (2, 10))
    cache = KeyValueCache(10, lambda: False)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for start, stop in ((0, 6), (6, 7), (7, 10)):
            cache.seen = start
            found = model(ids[:, start:stop], use_cache=True, **{cache_argument(model): cache}).logits
            assert (found - expected[:, start:stop]).abs().max() < 1e-12


def test_top_k_draws_only_the_k_likeliest_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(200, 4)
    draws = [torch.Generator().manual_seed(i) for i in range(200)]

    assert set(Sampling(2.0, top_k=2).pick(logits, draws).flatten().tolist()) == {1, 3}
    assert set(Sampling(0.0).pick(logits, draws).flatten().tolist()) == {1}
    with pytest.raises(TrainingError, match="top_k=0"):
        Sampling(1.0, top_k=0)
