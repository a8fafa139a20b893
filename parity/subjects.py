"""Models that are trained here, with dropout where asked, their data, and losses with even and uneven weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models_zoo as zoo
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Subject:
    """make: builds the model with a probability of dropping and a number of layers. sample, padded: (rows, generator)
    -> (input, target). stages: the modules with which those of five stages begin; else nbkit finds them.
    """

    name: str
    make: Callable[[float, int], nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Any, Any]]
    padded: Callable[[int, torch.Generator], tuple[Any, Any]]
    stages: tuple[str, ...] | None = None

    def build(self, dtype: torch.dtype, dropout: float, layers: int) -> nn.Module:
        """In training mode, the same weights every time; in float32 without kinks, see `_smooth`."""
        made = zoo.Specimen(lambda: self.make(dropout, layers), self.sample, mean, ()).build(dtype)
        return (made if dtype == torch.float64 else _smooth(made)).train()

    def items(self, num: int, dtype: torch.dtype, *, masked: bool) -> list[tuple[Any, Any]]:
        """`num` samples; masked: with padding where the model takes a mask for it."""
        draw = torch.Generator().manual_seed(11)
        rows = (self.padded if masked else self.sample)(num, draw)
        return [(_row(rows[0], i, dtype), rows[1][i]) for i in range(num)]


def _smooth(model: nn.Module) -> nn.Module:
    """GELU for ReLU, in place. What lies at the kink of a ReLU is above it in one order of summing and below it in
    another: in float32 one process is 4.6e-3 off from itself in 50 steps of the encoder when it cuts its batch in two.
    """
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation, part.activation_relu_or_gelu = F.gelu, 2
        for name, child in part.named_children():
            if isinstance(child, nn.ReLU):
                setattr(part, name, nn.GELU())
    return model


def _row(value: Any, i: int, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _row(part, i, dtype) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_row(part, i, dtype) for part in value)
    return value[i].to(dtype) if value.is_floating_point() else value[i]


def mean(output: Any, target: Tensor) -> Tensor:
    """The loss of a plain tensor, or of an HF model's output."""
    return zoo.cross_entropy(getattr(output, "logits", output), target)


def weighted(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight): what is padding does not count, nor do two classes of five: each row weighs something else."""
    logits = getattr(output, "logits", output)
    keep = (target >= 0) & (target % 5 > 1)
    losses = F.cross_entropy(logits.flatten(0, -2), target.clamp(min=0).flatten(), reduction="none")
    return (losses * keep.flatten()).sum(), keep.sum()


def _gpt(dropout: float, layers: int) -> nn.Module:
    return zoo.gpt(layers, dropout=dropout)


def _gpt_tied(dropout: float, layers: int) -> nn.Module:
    model: Any = _gpt(dropout, layers)
    model.head.weight = model.tokens.weight
    return model  # type: ignore[no-any-return]


def _gpt2(dropout: float, layers: int) -> nn.Module:
    return zoo.hf_gpt2(layers, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def _llama(dropout: float, layers: int, *, tied: bool = False) -> nn.Module:
    """Two query heads for each of the key-value heads, which four ranks divide."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return zoo.hf_llama(layers, attention_dropout=dropout, tie_word_embeddings=tied, **heads)


def _llama_tied(dropout: float, layers: int) -> nn.Module:
    return _llama(dropout, layers, tied=True)


def _encoder(dropout: float, layers: int) -> nn.Module:
    model = zoo.Encoder(layers)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = dropout
    return model


def _convs(dropout: float, layers: int) -> nn.Module:
    return zoo.TenConvs()


_IMAGES = zoo.classes(3, 12, 12)
_PAIRS = tuple(f"convs.{i}" for i in range(2, 10, 2))

SUBJECTS = {
    made.name: made
    for made in (
        Subject("gpt", _gpt, zoo.next_tokens, zoo.next_tokens),
        Subject("gpt_tied", _gpt_tied, zoo.next_tokens, zoo.next_tokens),
        Subject("gpt2", _gpt2, zoo.next_tokens, zoo.padded_tokens),
        Subject("llama", _llama, zoo.next_tokens, zoo.padded_tokens),
        Subject("llama_tied", _llama_tied, zoo.next_tokens, zoo.padded_tokens),
        Subject("encoder", _encoder, zoo.encoder_rows, zoo.encoder_rows),
        Subject("ten_convs", _convs, _IMAGES, _IMAGES, _PAIRS),
    )
}
