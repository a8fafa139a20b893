"""Models written in unusual ways, which tensor parallelism must split correctly or leave whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.models.gpt import Block
from verify.models.specimens import HEADS, VOCAB, WIDTH, hf_gpt2, hf_llama, lora


def lora_llama(**options: Any) -> nn.Module:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    return lora(hf_llama(2), options.pop("targets", targets), **options).double()


def lora_gpt2() -> nn.Module:
    return lora(hf_gpt2(2), ["c_attn", "c_proj"]).double()


class Packed(nn.Module):
    """An attention with one matrix for query, key and value, cut by the width of the input, as in many small GPTs."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(PackedBlock() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = PackedAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH + 1), nn.GELU(), nn.Linear(3 * WIDTH + 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class PackedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head = HEADS

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        q, k, v = (
            t.view(rows, length, self.n_head, width // self.n_head).transpose(1, 2)
            for t in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))


class PerHead(PackedAttention):
    """Has query, key and value of each head side by side, which no name shows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2).chunk(3, -1)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def per_head() -> nn.Module:
    model = Packed()
    for block in model.blocks:
        block.attn = PerHead()
    return model


class FromConfig(nn.Module):
    """Reads its number of heads from a shared config, normalizes its queries, and adds its residual itself."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_norm = nn.LayerNorm(WIDTH // config.num_heads)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (
            m(n).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2) for m in (self.to_q, self.to_k, self.to_v)
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask=bias)
        return x + self.to_out(y.transpose(1, 2).flatten(2))


class Configured(nn.Module):
    """Attentions that are blocks themselves, and share a learned mask."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        config = SimpleNamespace(num_heads=HEADS)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.bias = nn.Parameter(torch.randn(16, 16))
        self.blocks = nn.ModuleList(FromConfig(config) for _ in range(2))
        if not norm:
            for block in self.blocks:
                block.norm = nn.Identity()
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, bias=self.bias[: x.shape[1], : x.shape[1]])
        return self.head(x.mean(1))


class Hidden(nn.Module):
    """Has its number of heads in no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByHand(nn.Module):
    """Multiplies by the weight of its second linear layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc1(x)) @ self.fc2.weight.t()


class Translator(nn.Module):
    """An encoder and a decoder of torch's layers, with masks. The decoder attends to the output of the encoder."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": batch_first}
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, norm_first=True, activation="gelu", **sizes)
        decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, **sizes)
        self.encoder = nn.TransformerEncoder(encoder, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, padding: Tensor, target: Tensor) -> Tensor:
        a, b = self.tokens(source), self.tokens(target)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=a.dtype)
        if not self.batch_first:
            a, b = a.transpose(0, 1), b.transpose(0, 1)
        memory = self.encoder(a, src_key_padding_mask=padding)
        y = self.decoder(b, memory, tgt_mask=mask, memory_key_padding_mask=padding)
        return self.head(y if self.batch_first else y.transpose(0, 1))


class Halving(Block):
    """Drops every second position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, ::2]


class Deciding(Block):
    """Has a property as its forward."""

    @property
    def forward(self) -> Any:  # type: ignore[override]
        return super().forward


class Looks(nn.Module):
    """An nn.MultiheadAttention, called in several ways: for its weights, with 3-D masks, without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, attn_mask=mask)
        y = y + self.attention(x, x.flip(1), x, need_weights=False, attn_mask=mask)[0]
        return y + self.attention(x[0], x[0], x[0], need_weights=False)[0]
