"""Models with random operations in their attentions and MLPs, some of which can be split by hand.

`random_model(seed)` is (model, number of pairs of linear layers of which a rank can compute its part).
Token ids (B, T) -> logits (B, T, V).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, INNER, LENGTH = 48, 32, 4, 64, 12
HEAD = WIDTH // HEADS

Op = Callable[[Any, Tensor], Tensor]


def _first(s: Any, h: Tensor) -> Tensor:
    h = h * 1
    h[..., 0] = 0
    return h


def _past(s: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 1:] += h[:, :-1].clone()
    return h


def _masked(s: Any, h: Tensor) -> Tensor:
    return torch.where(h.abs() < 0.1, torch.zeros_like(h), h)


def _halves(s: Any, h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([b, a], -1)


def _by_parts(s: Any, h: Tensor) -> Tensor:
    return torch.cat([part.tanh() for part in h.chunk(2, -1)], -1)


def _through_a_view(s: Any, h: Tensor) -> Tensor:
    h = h * 1
    h.view(*h.shape[:-1], -1, 8)[..., 0].mul_(0.5)
    return h


def _scattered(s: Any, h: Tensor) -> Tensor:
    return torch.zeros_like(h).scatter(1, s.order[:, None].expand_as(h), h.sin())


PART: Mapping[str, Op] = {
    "gelu": lambda s, h: F.gelu(h),
    "relu in place": lambda s, h: (h * 1).relu_(),
    "tanh": lambda s, h: torch.tanh(h),
    "clamp": lambda s, h: h.clamp(-0.8, 0.9),
    "square": lambda s, h: F.relu(h).pow(2),
    "where": _masked,
    "a learned scalar": lambda s, h: h * s.scalar,
    "a slope": lambda s, h: s.slope(h),
    "a functional scalar": lambda s, h: h * F.softplus(s.scalar),
    "groups of eight": lambda s, h: h.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2),
    "norm of eight": lambda s, h: F.layer_norm(h.unflatten(-1, (-1, 8)), (8,)).flatten(-2),
    "sorted in eight": lambda s, h: h.view(*h.shape[:-1], -1, 8).sort(-1).values.flatten(-2),
    "a learned norm of eight": lambda s, h: s.norm(h.unflatten(-1, (-1, 8))).flatten(-2),
    "softmax of positions": lambda s, h: h.softmax(1),
    "cumsum of positions": lambda s, h: h.cumsum(1) / 8,
    "positions sorted": lambda s, h: h.sort(1).values,
    "positions flipped": lambda s, h: h.flip(1),
    "positions shifted in place": _past,
    "mean of positions": lambda s, h: h - h.mean(1, keepdim=True),
    "transposed": lambda s, h: h.transpose(1, 2).contiguous().relu().transpose(1, 2),
    "rows together": lambda s, h: F.silu(h.reshape(-1, h.shape[-1])).view_as(h),
    "gated by itself": lambda s, h: h * h.detach().sigmoid(),
    "by parts": _by_parts,
    "positions mixed": lambda s, h: torch.einsum("ts,bsf->btf", s.mixer, h),
    "positions mixed by baddbmm": lambda s, h: torch.baddbmm(h, s.mixer.expand(len(h), -1, -1), h.tanh()),
    "features by einsum": lambda s, h: torch.einsum("btf,btf->btf", h, h.sigmoid()),
    "a functional map of eight": lambda s, h: F.linear(h.unflatten(-1, (-1, 8)), s.small).flatten(-2),
    "an expanded scalar": lambda s, h: torch.addcmul(h, s.scalar.expand(h.shape), h.sin()),
    "chunks of positions": lambda s, h: torch.cat([part.tanh() for part in h.chunk(3, 1)], 1),
    "positions gathered": lambda s, h: h.gather(1, s.order[None, :, None].expand_as(h)),
    "positions selected": lambda s, h: h.index_select(1, s.order),
    "positions scattered": _scattered,
    "topk of positions": lambda s, h: h.masked_fill(h < h.topk(5, 1).values[:, -1:], 0),
    "masked positions": lambda s, h: h.masked_fill((s.order % 3 == 0)[:, None], 0.1),
    "softmax of rows": lambda s, h: h * h.softmax(0),
    "norm of positions": lambda s, h: h / (1 + h.norm(dim=1, keepdim=True)),
    "deviation of positions": lambda s, h: h / (1 + h.var((0, 1), keepdim=True)).sqrt(),
    "pooled positions": lambda s, h: F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "in place through a view": _through_a_view,
    "stacked": lambda s, h: torch.stack([h, h.cos()]).amax(0),
}
"""Operations between maps of which a rank can do its part."""

WHOLE: Mapping[str, Op] = {
    "softmax": lambda s, h: h.softmax(-1),
    "layer_norm": lambda s, h: F.layer_norm(h, h.shape[-1:]),
    "centred": lambda s, h: h - h.mean(-1, keepdim=True),
    "normalize": lambda s, h: F.normalize(h, dim=-1),
    "cumsum": lambda s, h: h.cumsum(-1) / 8,
    "sort": lambda s, h: h.sort(-1).values,
    "flip": lambda s, h: h.flip(-1),
    "roll": lambda s, h: h.roll(1, -1),
    "halves": _halves,
    "first in place": _first,
    "ramp": lambda s, h: h * torch.linspace(0, 1, h.shape[-1]).to(h),
    "width": lambda s, h: h / h.shape[-1] ** 0.5,
    "topk": lambda s, h: h.masked_fill(h < h.topk(6, -1).values[..., -1:], 0),
    "largest": lambda s, h: h - h.amax(-1, keepdim=True),
    "deviation": lambda s, h: h / (1 + h.std()),
    "four groups": lambda s, h: h.unflatten(-1, (4, -1)).softmax(-1).flatten(-2),
    "across groups": lambda s, h: h.unflatten(-1, (-1, 8)).softmax(-2).flatten(-2),
    "a matrix of features": lambda s, h: F.linear(h, s.matrix[: h.shape[-1], : h.shape[-1]]),
    "a matrix by einsum": lambda s, h: torch.einsum("btf,fg->btg", h, s.matrix[: h.shape[-1], : h.shape[-1]]),
    "a functional vector": lambda s, h: h * s.vector[: h.shape[-1]],
    "features gathered": lambda s, h: h.gather(-1, torch.arange(h.shape[-1] - 1, -1, -1).expand_as(h)),
    "the first expanded": lambda s, h: h + h[..., :1].expand_as(h),
    "the place of the largest": lambda s, h: h * (1 + h.argmax(-1, keepdim=True) / 64),
    "below the mean": lambda s, h: h.masked_fill(h < h.mean(-1, keepdim=True), 0),
    "softmax of everything": lambda s, h: h * h.flatten(1).softmax(-1).view_as(h) * 100,
    "logsumexp": lambda s, h: h - h.logsumexp(-1, keepdim=True),
    "norm of everything": lambda s, h: h / (1 + h.norm()),
    "four chunks in turns": lambda s, h: torch.stack(h.chunk(4, -1), -1).flatten(-2),
    "rows flattened": lambda s, h: h.reshape(len(h), -1).cumsum(-1).view_as(h) / 64,
}
"""Operations between maps that need all features."""


class Ops(nn.Module):
    """A list of operations, and what they use."""

    def __init__(self, ops: list[Op]) -> None:
        super().__init__()
        self.ops = ops
        self.scalar = nn.Parameter(torch.tensor(1.3))
        self.slope, self.norm = nn.PReLU(), nn.LayerNorm(8)
        self.small, self.vector = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.rand(INNER) + 0.5)
        self.register_buffer("order", torch.randperm(LENGTH))
        self.register_buffer("mixer", torch.randn(LENGTH, LENGTH) / 4)
        self.register_buffer("matrix", torch.randn(INNER, INNER) / 8)

    def between(self, h: Tensor) -> Tensor:
        for op in self.ops:
            h = op(self, h)
        return h


class MLP(Ops):
    def __init__(self, ops: list[Op], way: str) -> None:
        super().__init__(ops)
        self.way = way
        self.p1 = nn.Linear(WIDTH, INNER * (2 if "packed" in way else 1), bias="bare" not in way)
        self.p2 = nn.Linear(INNER, WIDTH)
        if way == "gated":
            self.p3 = nn.Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        h = self.p1(x)
        if self.way == "packed":
            a, b = h.chunk(2, -1)
            h = F.silu(a) * b
        elif self.way == "packed in turns":
            h = h[..., ::2].sigmoid() * h[..., 1::2]
        elif self.way == "gated":
            h = F.silu(self.p3(x)) * h
        return self.p2(self.between(h))  # type: ignore[no-any-return]


class Attention(Ops):
    def __init__(self, ops: list[Op], pack: str, count: str, how: str, extra: str) -> None:
        super().__init__(ops)
        self.pack, self.count, self.how, self.extra = pack, count, how, extra
        self.h, self.g, self.w = HEADS, 2 if pack == "grouped" else HEADS, WIDTH
        if pack in ("split", "by head"):
            self.m1 = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.m1 = nn.Linear(WIDTH, WIDTH)
            self.m2, self.m3 = nn.Linear(WIDTH, self.g * HEAD), nn.Linear(WIDTH, self.g * HEAD)
        self.m4 = nn.Linear(WIDTH, WIDTH)
        if extra == "gate":
            self.m5 = nn.Linear(WIDTH, WIDTH)
        self.of_head = nn.LayerNorm(HEAD)
        self.register_buffer("sharp", torch.rand(HEADS, 1, 1) + 0.5)

    def heads(self, x: Tensor, heads: int) -> Tensor:
        rows, length, _ = x.shape
        if self.count == "feature size":
            return x.view(rows, length, -1, HEAD).transpose(1, 2)
        if self.count == "attribute":
            return x.view(rows, length, heads, -1).transpose(1, 2)
        if self.count == "constant":
            return x.unflatten(-1, (HEADS if heads == self.h else 2, -1)).transpose(1, 2)
        return x.view(rows, length, heads, self.w // self.h).transpose(1, 2)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.pack == "split":
            q, k, v = self.m1(x).split(x.shape[-1] if self.count == "all sizes" else self.w, -1)
            return self.heads(q, self.h), self.heads(k, self.h), self.heads(v, self.h)
        if self.pack == "by head":
            rows, length, _ = x.shape
            q, k, v = self.m1(x).view(rows, length, self.h, -1).transpose(1, 2).chunk(3, -1)
            return q, k, v
        return self.heads(self.m1(x), self.h), self.heads(self.m2(x), self.g), self.heads(self.m3(x), self.g)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        if self.extra == "norm of a head":
            q, k = self.of_head(q), F.normalize(k, dim=-1)
        elif self.extra == "norm of all heads":
            q = q / q.pow(2).mean((1, 3), keepdim=True).add(1e-3).sqrt()
        elif self.extra == "temperature of a head":
            q = q * self.sharp
        elif self.extra == "a learned temperature":
            q = q * self.scalar
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "einsum":
            y = torch.einsum("bhts,bhsd->bhtd", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1), v)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if self.extra == "mean over heads":
                scores = scores + scores.mean(1, keepdim=True)
            if self.extra == "by distance":
                far = torch.arange(scores.shape[-1]).to(scores)
                scores = (
                    scores
                    - (far[:, None] - far).abs() * 2.0 ** -torch.arange(scores.shape[1]).to(scores)[:, None, None]
                )
            y = scores.softmax(-1) @ v
        if self.count == "all sizes":
            y = y.transpose(1, 2).contiguous().view(x.shape)
        else:
            y = y.transpose(1, 2).flatten(2)
        if self.extra == "gate":
            y = y * torch.sigmoid(self.m5(x))
        return self.m4(self.between(y))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None, mlp: nn.Module | None, way: str) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.b1, self.b2, self.way = attention, mlp, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "parallel" and self.b1 is not None and self.b2 is not None:
            n = self.n1(x)
            return x + self.b1(n) + self.b2(n)  # type: ignore[no-any-return]
        for norm, part in ((self.n1, self.b1), (self.n2, self.b2)):
            if part is not None:
                x = norm(x + part(x)) if self.way == "norms behind" else x + part(norm(x))
        if self.way == "positions mixed":
            x = x + x.cumsum(1) / 12
        return x


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.t1 = nn.Embedding(VOCAB, WIDTH)
        self.t2 = nn.ModuleList(blocks)
        self.t3 = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.t1(ids)
        for block in self.t2:
            x = block(x)
        return self.t3(x)  # type: ignore[no-any-return]


_PARTS = ("none", "norm of a head", "a learned temperature", "gate")
_WHOLES = ("norm of all heads", "temperature of a head", "mean over heads", "by distance")


def random_model(seed: int) -> tuple[nn.Module, int]:
    """Return the model of this seed, and the number of its pairs that can be split by hand."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def ops(most: int) -> tuple[list[Op], bool]:
        found = [PART[draw.choice(list(PART))] for _ in range(draw.randint(0, most))]
        whole = draw.random() < 0.3
        if whole:
            found.insert(draw.randint(0, len(found)), WHOLE[draw.choice(list(WHOLE))])
        return found, not whole

    kind = draw.choice(("both", "both", "mlp", "attention"))
    pairs, of_attention, of_mlp = 0, None, None
    if kind != "mlp":
        among, part = ops(1)
        extra = draw.choice(_PARTS if draw.random() < 0.7 else _WHOLES)
        how = "by hand" if extra in ("mean over heads", "by distance") else draw.choice(("sdpa", "einsum", "by hand"))
        pack = draw.choice(("apart", "split", "by head", "grouped"))
        count = draw.choice(("feature size", "attribute", "constant", "all sizes"))
        pairs += part and extra in _PARTS
        of_attention = (among, pack, count, how, extra)
    if kind != "attention":
        more, part = ops(3)
        pairs += part
        of_mlp = (more, draw.choice(("plain", "bare", "gated", "packed", "packed in turns")))
    around = draw.choice(("plain", "plain", "parallel", "norms behind", "positions mixed"))
    blocks = [
        Block(Attention(*of_attention) if of_attention else None, MLP(*of_mlp) if of_mlp else None, around)
        for _ in range(2)
    ]
    model = Model(blocks).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.1)
    return model, 2 * pairs
