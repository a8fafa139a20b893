"""The models of the checks, by name: how they are built, their rows and their loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.models.gpt import GPT, GPTConfig
from verify.models.specimens import hf_llama, llama_sizes

VOCAB, LENGTH, SIDE = 256, 32, 32


@dataclass(frozen=True)
class Model:
    """A model of the checks. make: builds it. batch: number of rows -> (input, target)."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]


def model(name: str, width: int) -> Model:
    """Return the model `name`, one of `NAMES`. width: of its hidden states, a multiple of its 8 heads."""
    return _MODELS[name](width)


def loss(output: Any, target: Tensor) -> Tensor:
    """Return the cross entropy of a plain tensor, or of an HF model's output."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _gpt(width: int) -> Model:
    config = GPTConfig(vocab=VOCAB, block=LENGTH, layers=8, heads=8, width=width)
    return Model(lambda: GPT(config), _tokens)


def _llama(width: int) -> Model:
    return Model(lambda: hf_llama(8, **_sizes(width)), _tokens)


def _mixtral(width: int) -> Model:
    def make() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        routed = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return MixtralForCausalLM(MixtralConfig(**llama_sizes(4, **_sizes(width)), **routed))

    return Model(make, _tokens)


def _vit(width: int) -> Model:
    def make() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(
            ViTConfig(
                hidden_size=width,
                num_hidden_layers=8,
                num_attention_heads=8,
                intermediate_size=4 * width,
                image_size=SIDE,
                patch_size=4,
                num_labels=16,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="sdpa",
            )
        )

    return Model(make, _images)


def _sizes(width: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    widths = {"hidden_size": width, "intermediate_size": 2 * width}
    return {"vocab_size": VOCAB, "max_position_embeddings": LENGTH, **widths, **heads}


def _tokens(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(rows))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _images(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, SIDE, SIDE, generator=draw), torch.randint(0, 16, (rows,), generator=draw)


_MODELS: dict[str, Callable[[int], Model]] = {"gpt": _gpt, "llama": _llama, "vit": _vit, "mixtral": _mixtral}
NAMES = tuple(_MODELS)
