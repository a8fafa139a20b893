"""Language models as people write them without a library, each with its own structure."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from verify.models.specimens import (
    HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    Specimen,
    cross_entropy,
    hf_gpt2,
    lora,
    next_tokens,
    object_cross_entropy,
)


class CausalSelfAttention(nn.Module):
    """The attention of nanoGPT, which has two ways to attend."""

    def __init__(self, *, flash: bool = True) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd, self.flash = HEADS, WIDTH, flash
        self.register_buffer("bias", torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.c_proj, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    def __init__(self, *, flash: bool = True) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention(flash=flash)
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """The model of nanoGPT. recompute: by torch.utils.checkpoint in forward. pairs: forward returns (logits, loss)."""

    def __init__(self, *, flash: bool = True, recompute: bool = False, pairs: bool = False) -> None:
        super().__init__()
        self.recompute, self.pairs = recompute, pairs
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(NanoBlock(flash=flash) for _ in range(3)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if not self.pairs:
            return logits
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class LlamaBlock(nn.Module):
    """Grouped heads, rotary positions as an argument, and a gated MLP, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.dim = HEADS, HEADS // 2, WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, self.n_kv * self.dim, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.attention_norm(x)
        q = self.wq(h).view(rows, length, self.n_heads, self.dim).transpose(1, 2)
        k, v = (each(h).view(rows, length, self.n_kv, self.dim).transpose(1, 2) for each in (self.wk, self.wv))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (each.repeat_interleave(self.n_heads // self.n_kv, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(rows, length, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(3))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCAB, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH).double(), 100.0 ** (-torch.arange(half).double() / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, cos, sin = self.tok_embeddings(ids), self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class Translator(nn.Module):
    """torch's nn.Transformer, an encoder and a decoder: (source, target so far) -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.positions.dtype)
        y = self.transformer(
            self.source(source) + self.positions[: source.shape[1]],
            self.target(target) + self.positions[: target.shape[1]],
            tgt_mask=causal,
            tgt_is_causal=True,
        )
        return self.head(y)


class Experts(nn.Module):
    """A mixture of four experts. Each token goes through its best two, selected by index.

    skips: an expert without tokens is not called.
    """

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(NanoMLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if self.skips and not len(rows):
                continue
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


class Routing(Experts):
    """Experts, of which the last is never chosen. Returns their output and the size of the router's logits."""

    skips = True

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        with torch.no_grad():
            self.gate.bias[-1] = -1e3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + super().forward(x), self.gate(x).logsumexp(-1).square().mean()


class AuxiliaryLoss(nn.Module):
    """A language model of experts with the z-loss of ST-MoE (Zoph et al. 2022), a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Routing() for _ in range(2))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x, auxiliary = self.wte(ids), torch.zeros((), dtype=self.head.weight.dtype, device=ids.device)
        for layer in self.layers:
            x, more = layer(x)
            auxiliary = auxiliary + more
        return {"logits": self.head(x), "aux_loss": auxiliary}


class TiedRecurrent(nn.Module):
    """An LSTM language model whose head is its embedding, as in torch's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCAB)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.rnn(self.drop(self.encoder(ids)))
        return self.decoder(self.drop(output))


class Universal(nn.Module):
    """A language model with the same block at all depths, as in ALBERT and the Universal Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.depth = NanoBlock(), 3
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for _ in range(self.depth):
            x = self.block(x)
        return self.head(self.norm(x))


class Towers(nn.Module):
    """Two encoders and a score of each pair of rows: (ids, ids) -> (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.query, self.document = (nn.ModuleList(NanoBlock() for _ in range(2)) for _ in range(2))
        self.mix = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        q, d = self.wte(query), self.wte(document)
        for block in self.query:
            q = block(q)
        for block in self.document:
            d = block(d)
        return self.mix(q.mean(1), d.mean(1))[:, 0]


def _moe() -> nn.Module:
    model = NanoGPT()
    for block in model.transformer.h:
        block.mlp = Experts()
    return model


def _source_and_target(rows: int, draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    source, target = (torch.randint(VOCAB, (rows, LENGTH), generator=draw) for _ in range(2))
    return (source, target.roll(1, 1)), target


def _scored_pairs(rows: int, draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    query, document = (torch.randint(VOCAB, (rows, LENGTH), generator=draw) for _ in range(2))
    return (query, document), torch.rand(rows, generator=draw)


def _first(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output[0], target)


def with_auxiliary(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return the cross entropy and a tenth of the auxiliary loss."""
    return cross_entropy(output["logits"], target) + 0.1 * output["aux_loss"]


BY_HAND: dict[str, Specimen] = {
    "nanogpt": Specimen(lambda: NanoGPT(pairs=True), next_tokens, _first),
    "nanogpt_by_hand": Specimen(lambda: NanoGPT(flash=False), next_tokens, cross_entropy),
    "nanogpt_checkpoint": Specimen(lambda: NanoGPT(recompute=True), next_tokens, cross_entropy),
    "llama_by_hand": Specimen(Llama, next_tokens, cross_entropy),
    "translator": Specimen(Translator, _source_and_target, cross_entropy),
    "moe_by_hand": Specimen(_moe, next_tokens, cross_entropy),
    "lstm": Specimen(TiedRecurrent, next_tokens, cross_entropy),
    "universal": Specimen(Universal, next_tokens, cross_entropy),
    "towers": Specimen(Towers, _scored_pairs, F.mse_loss),
    "lora": Specimen(lambda: lora(hf_gpt2(2), ["c_attn", "c_fc"]), next_tokens, object_cross_entropy),
}
