"""Models that compute something between the two linear layers of a pair, or around them, only in forward.

`MODELS[name]` is (make, number of pairs in its two blocks that can be split). A pair can be split if a rank can compute
its part alone. Token ids (B, T) -> logits (B, T, V). `deep` models also have attentions, so that their positions are
split too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verify.models.specimens import HEADS, LENGTH, VOCAB, WIDTH

INNER = 2 * WIDTH
HEAD = WIDTH // HEADS

Between = Callable[[Any, Tensor, Tensor], Tensor]


class MLP(nn.Module):
    """An MLP that computes x + down(between(up(x)))."""

    def __init__(self, between: Between, more: Callable[[Any], None] | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.between = between
        if more is not None:
            more(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self, self.up(x), x))


class Attention(nn.Module):
    """An attention with changes. change: (attention, q, k, v, x) -> q, k, v before the heads are parted.

    score: (attention, scores, x) -> weights (B, H, T, T). join: (attention, y (B, H, T, d), x) -> y.
    """

    def __init__(self, change: Any = None, score: Any = None, join: Any = None, more: Any = None) -> None:
        super().__init__()
        self.num_heads, self.total_heads = HEADS, HEADS + 0
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.change, self.score, self.join = change, score, join
        if more is not None:
            more(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.change is not None:
            q, k, v = self.change(self, q, k, v, x)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.softmax(-1) if self.score is None else self.score(self, scores, x)
        y = weights @ v
        if self.join is not None:
            y = self.join(self, y, x)
        return self.out(y.transpose(1, 2).flatten(2))


class TwiceSloped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None, mlp: nn.Module | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        if self.attn is not None:
            x = x + self.attn(self.norm1(x))
        return x if self.mlp is None else self.mlp(x)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(between: Between, more: Any = None) -> Callable[[], nn.Module]:
    return lambda: Model(lambda: Block(None, MLP(between, more)))


def deep(between: Between, more: Any = None) -> Callable[[], nn.Module]:
    return lambda: Model(lambda: Block(Attention(), MLP(between, more)))


def attention(change: Any = None, score: Any = None, join: Any = None, more: Any = None) -> Callable[[], nn.Module]:
    return lambda: Model(lambda: Block(Attention(change, score, join, more), None))


def has(name: str, value: Callable[[], Tensor], *, learned: bool = True) -> Callable[[Any], None]:
    def give(part: Any) -> None:
        if learned:
            setattr(part, name, nn.Parameter(value()))
        else:
            part.register_buffer(name, value())

    return give


def child(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda part: setattr(part, name, make())


def children(**makers: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def give(part: Any) -> None:
        for name, make in makers.items():
            setattr(part, name, make())

    return give


def _in_place(s: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * 1
    h[..., 0] = 0
    return h


def _changed(s: Any, h: Tensor, x: Tensor) -> Tensor:
    h = F.gelu(h)
    h -= h.mean(-1, keepdim=True)
    return h


def _kept(s: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.masked_fill(h < h.topk(8, -1).values[..., -1:], 0)


def _halves(s: Any, h: Tensor, x: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([a * F.gelu(b), b], -1)


def _short(s: Any, h: Tensor, x: Tensor) -> Tensor:
    """Scale `h` to a norm of at most 40. It is rarely larger."""
    return h * (40 / h.norm(dim=-1, keepdim=True)).clamp(max=1)


def _aside(s: Any, h: Tensor, x: Tensor) -> Tensor:
    s.aside = h.pow(2).mean()
    return F.gelu(h)


class Penalised(Model):
    """Adds the penalties that its MLPs have stored."""

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        return y * (1 + sum(block.mlp.aside for block in self.blocks))  # type: ignore[union-attr]


class Reading(Model):
    """Reads a weight of its blocks itself."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * sum(block.mlp.up.weight.pow(2).mean() for block in self.blocks)  # type: ignore


class Counting(Model):
    """Reads the number of heads from the attention of its first block."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / self.blocks[0].attn.num_heads  # type: ignore[union-attr]


class SelfTied(Model):
    """Multiplies its output by its embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0.1 * F.linear(x, self.tokens.weight)


class Scaled(nn.Embedding):
    """Scales the embedding, as Gemma does."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


def scaled(tied: bool = True) -> nn.Module:
    made = Model(lambda: Block(Attention(), MLP(gelu, None)))
    made.tokens = Scaled(VOCAB, WIDTH)
    if tied:
        made.head.weight = made.tokens.weight
    return made


def three_places() -> nn.Module:
    made: Any = Model(lambda: Block(Attention(), MLP(gelu, None)))
    made.again = nn.Embedding(VOCAB, WIDTH)
    made.again.weight = made.head.weight = made.tokens.weight
    block = made.blocks[0]
    made.blocks[0] = nn.Identity()
    forward = Model.forward

    class Three(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return forward(self, ids) + self.head(block_of(self)(self.again(ids.flip(1))))  # type: ignore[operator]

    made.__class__ = Three
    made.side = block
    return made  # type: ignore[no-any-return]


def block_of(model: Any) -> Any:
    return model.side


def tied_mlps() -> nn.Module:
    made: Any = Model(lambda: Block(None, MLP(gelu, None)))
    made.blocks[1].mlp.up.weight = made.blocks[0].mlp.up.weight
    return made  # type: ignore[no-any-return]


def tied_to_the_outside() -> nn.Module:
    made: Any = Model(lambda: Block(None, MLP(gelu, None)))
    made.extra = nn.Linear(WIDTH, INNER)
    made.extra.weight = made.blocks[0].mlp.up.weight

    class Extra(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.extra(self.tokens(ids)).mean(-1, keepdim=True)  # type: ignore

    made.__class__ = Extra
    return made  # type: ignore[no-any-return]


class Mixing(Block):
    """Mixes positions by a function, beside the linear layers."""

    how = staticmethod(lambda x: x.cumsum(1) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.how(x))


class MeanOf(Mixing):
    how = staticmethod(lambda x: x + x.mean(1, keepdim=True))


class Shifting(Mixing):
    how = staticmethod(lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)))


class FirstOf(Mixing):
    how = staticmethod(lambda x: x + x[:, :1])


class LearnedMask(Block):
    """Passes a vector of the block to its attention."""

    def __init__(self, attention: nn.Module | None, mlp: nn.Module | None) -> None:
        super().__init__(attention, mlp)
        self.attn = Biased()
        self.far = nn.Parameter(torch.randn(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), self.far)  # type: ignore[misc]
        return self.mlp(x)  # type: ignore[misc]


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).flatten(2))


class NormedMemory(nn.Module):
    """Attends to a memory, which it normalizes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = self.norm(memory)
        q, k, v = (
            m(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for m, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Remembering(Model):
    """Lets every block attend to the embedding."""

    def __init__(self, attend: Callable[[], nn.Module] = NormedMemory) -> None:
        super().__init__(lambda: nn.ModuleDict({"attn": attend(), "mlp": MLP(gelu, None)}))

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.tokens(ids)
        x = memory
        for block in self.blocks:
            x = block["mlp"](x + block["attn"](x, memory))  # type: ignore[index]
        return self.head(x)


class GatedFromOutside(nn.Module):
    """Takes the gate as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)) * gate)


class Routed(Model):
    def __init__(self) -> None:
        super().__init__(GatedFromOutside)
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.router(x).sigmoid())
        return self.head(self.norm(x))


class FunctionalMemory(NormedMemory):
    """Normalizes the memory without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x, F.layer_norm(memory, memory.shape[-1:]))


class Telling(nn.Module):
    """Returns its hidden features together with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.up(x))
        return x + self.down(h), h


class Listening(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.mlp, self.used = Telling(), used

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.mlp(x)
        return y * h.std() if self.used else y


class Softened(nn.GELU):
    """An activation that is not elementwise, although its base class is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        y = h.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


def every_other() -> nn.Module:
    """Return a model in which an attribute says which of the MLPs needs all features."""
    made: Any = Model(lambda: Block(None, MLP(_by_number, None)))
    for number, block in enumerate(made.blocks):
        block.mlp.number = number
    return made  # type: ignore[no-any-return]


def _by_number(s: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.softmax(-1) if s.number else F.gelu(h)


def shared() -> nn.Module:
    """Return a model with one MLP in both blocks, which has a learned slope."""
    made: Any = Model(lambda: Block(None, MLP(lambda s, h, x: s.act(h), child("act", nn.PReLU))))
    made.blocks[1].mlp = made.blocks[0].mlp
    return made  # type: ignore[no-any-return]


def slope_elsewhere() -> nn.Module:
    """Return a model that also uses the slope of the first MLP itself."""
    made: Any = Model(lambda: Block(None, MLP(lambda s, h, x: s.act(h), child("act", nn.PReLU))))

    class Elsewhere(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.blocks[0].mlp.act.weight  # type: ignore[union-attr]

    made.__class__ = Elsewhere
    return made  # type: ignore[no-any-return]


def gelu(s: Any, h: Tensor, x: Tensor) -> Tensor:
    return F.gelu(h)


def _alibi(s: Any, scores: Tensor, x: Tensor) -> Tensor:
    far = torch.arange(scores.shape[-1]).to(scores)
    slopes = 2.0 ** -(torch.arange(scores.shape[1]).to(scores) + 1)
    return (scores - slopes[:, None, None] * (far[:, None] - far).abs()).softmax(-1)


def _by_head(s: Any, scores: Tensor, x: Tensor) -> Tensor:
    return torch.cat([scores[:, :1] * 3, scores[:, 1:]], 1).softmax(-1)


def _fixed_count(s: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Any:
    return q / s.total_heads, k, v


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    # Elementwise, or the same for each feature: a rank can compute its part by itself.
    "gelu": (mlp(gelu), 2),
    "gelu, deep": (deep(gelu), 4),
    "relu in place": (mlp(lambda s, h, x: h.relu_()), 2),
    "a learned slope": (mlp(lambda s, h, x: s.act(h), child("act", nn.PReLU)), 2),
    "a learned slope, deep": (deep(lambda s, h, x: s.act(h), child("act", nn.PReLU)), 4),
    "a learned temperature": (mlp(lambda s, h, x: F.gelu(h * s.t), has("t", lambda: torch.tensor(1.5))), 2),
    "groups of eight": (mlp(lambda s, h, x: h.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)), 2),
    "dropout": (mlp(lambda s, h, x: F.dropout(F.gelu(h), 0.0, s.training)), 2),
    "positions together": (mlp(lambda s, h, x: h.softmax(1)), 2),
    # All features.
    "softmax": (mlp(lambda s, h, x: h.softmax(-1)), 0),
    "softmax, deep": (deep(lambda s, h, x: h.softmax(-1)), 2),
    "log_softmax": (mlp(lambda s, h, x: F.log_softmax(h, -1)), 0),
    "normalize": (mlp(lambda s, h, x: F.normalize(h, dim=-1)), 0),
    "layer_norm": (mlp(lambda s, h, x: F.layer_norm(h, h.shape[-1:])), 0),
    "group_norm": (mlp(lambda s, h, x: F.group_norm(h.transpose(1, 2), 1).transpose(1, 2)), 0),
    "rms": (mlp(lambda s, h, x: h * h.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()), 0),
    "rms, deep": (deep(lambda s, h, x: h * h.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()), 2),
    "centring": (mlp(lambda s, h, x: h - h.mean(-1, keepdim=True)), 0),
    "centring in place": (mlp(_changed), 0),
    "sum": (mlp(lambda s, h, x: h * torch.sigmoid(h.sum(-1, keepdim=True))), 0),
    "mean of all": (mlp(lambda s, h, x: h / (1 + h.abs().mean())), 0),
    "variance": (mlp(lambda s, h, x: h / (1 + h.std(-1, keepdim=True))), 0),
    "maximum": (mlp(lambda s, h, x: h - h.amax(-1, keepdim=True)), 0),
    "max-norm": (mlp(_short), 0),
    "a norm that nothing goes through": (mlp(lambda s, h, x: h / (1 + h.detach().norm(dim=-1, keepdim=True))), 0),
    "topk": (mlp(_kept), 0),
    "roll": (mlp(lambda s, h, x: F.gelu(h.roll(1, -1))), 0),
    "flip": (mlp(lambda s, h, x: F.gelu(h.flip(-1))), 0),
    "sort": (mlp(lambda s, h, x: h.sort(-1).values), 0),
    "cumsum": (mlp(lambda s, h, x: h.cumsum(-1) / 8), 0),
    "permuted": (mlp(lambda s, h, x: h[..., s.order], has("order", lambda: torch.randperm(INNER), learned=False)), 0),
    "width": (mlp(lambda s, h, x: h / h.shape[-1] ** 0.5), 0),
    "count": (mlp(lambda s, h, x: F.gelu(h) * (h.numel() / 4096)), 0),
    "ramp": (mlp(lambda s, h, x: h * torch.linspace(0, 1, h.shape[-1]).to(h)), 0),
    "mixed": (
        mlp(lambda s, h, x: torch.einsum("btf,fg->btg", h, s.mix), has("mix", lambda: torch.randn(INNER, INNER) / 8)),
        0,
    ),
    "halves": (mlp(_halves), 0),
    "first": (mlp(_in_place), 0),
    "even": (mlp(lambda s, h, x: h * (torch.arange(h.shape[-1]) % 3).to(h)), 0),
    "four groups": (mlp(lambda s, h, x: h.unflatten(-1, (4, -1)).softmax(-1).flatten(-2)), 0),
    "over groups": (mlp(lambda s, h, x: h.unflatten(-1, (4, -1)).softmax(-2).flatten(-2)), 0),
    "pairs across": (mlp(lambda s, h, x: h.unflatten(-1, (2, -1)).flip(-2).flatten(-2)), 0),
    "fourier": (mlp(lambda s, h, x: torch.fft.rfft(h).abs().repeat_interleave(2, -1)[..., : h.shape[-1]]), 0),
    "gram": (mlp(lambda s, h, x: (h @ h.transpose(1, 2) / 64).softmax(-1) @ h), 0),
    "a buffer of features": (mlp(lambda s, h, x: h * s.b, has("b", lambda: torch.rand(INNER), learned=False)), 0),
    "a vector of features": (mlp(lambda s, h, x: F.gelu(h) * s.b, has("b", lambda: torch.rand(INNER))), 0),
    "batch norm": (
        mlp(lambda s, h, x: s.n(h.flatten(0, 1)).view_as(h), child("n", lambda: nn.BatchNorm1d(INNER))),
        0,
    ),
    "low rank": (
        mlp(
            lambda s, h, x: h + s.b(s.a(h)),
            children(a=lambda: nn.Linear(INNER, 2), b=lambda: nn.Linear(2, INNER)),
        ),
        0,
    ),
    "an agreement with the input": (mlp(lambda s, h, x: F.gelu(h) * x.mean(-1, keepdim=True)), 0),
    "a gate of the input": (
        mlp(lambda s, h, x: F.gelu(h) * torch.sigmoid(s.gate_of(x)), child("gate_of", lambda: nn.Linear(WIDTH, 1))),
        0,
    ),
    "a gate of the input, deep": (
        deep(lambda s, h, x: F.gelu(h) * torch.sigmoid(s.gate_of(x)), child("gate_of", lambda: nn.Linear(WIDTH, 1))),
        2,
    ),
    "a gate from outside": (Routed, 0),
    "laid aside": (lambda: Penalised(lambda: Block(None, MLP(_aside, None))), 0),
    "weight read": (lambda: Reading(lambda: Block(None, MLP(gelu, None))), 0),
    "beside its output, used": (lambda: Model(lambda: Listening(True)), 0),
    "beside its output": (lambda: Model(lambda: Listening(False)), 2),
    "a function of its own": (mlp(lambda s, h, x: Softmax.apply(h)), 0),  # type: ignore[no-any-return]
    "a subclass": (
        lambda: Model(lambda: nn.Sequential(nn.Linear(WIDTH, INNER), Softened(), nn.Linear(INNER, WIDTH))),
        0,
    ),
    "a row": (lambda: Model(lambda: nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))), 2),
    "in one block only": (every_other, 1),
    "in evaluation only": (mlp(lambda s, h, x: F.gelu(h) if s.training else h.softmax(-1)), 0),
    "by its mean": (mlp(lambda s, h, x: F.gelu(h) if h.mean() > 0.02 else torch.tanh(h)), 0),
    "sizes from elsewhere": (mlp(lambda s, h, x: F.gelu(h).view(h.shape[0], h.shape[1], INNER)), 0),
    "one MLP twice": (shared, 1),
    "a slope elsewhere": (slope_elsewhere, 1),
    "a slope inside and outside": (
        lambda: Model(lambda: Block(None, TwiceSloped(lambda s, h, x: s.act(h), child("act", nn.PReLU)))),
        0,
    ),
    # Attention.
    "attention": (attention(), 2),
    "attention, a learned temperature": (
        attention(score=lambda s, w, x: (w * s.t).softmax(-1), more=has("t", lambda: torch.tensor(2.0))),
        2,
    ),
    "norm of a head": (attention(join=lambda s, y, x: s.norm(y), more=child("norm", lambda: nn.LayerNorm(HEAD))), 2),
    "norm of all": (
        attention(lambda s, q, k, v, x: (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)),
        0,
    ),
    "alibi": (attention(score=_alibi), 0),
    "a head by its number": (attention(score=_by_head), 0),
    "a temperature for each head": (
        attention(
            score=lambda s, w, x: (w * s.t).softmax(-1),
            more=has("t", lambda: torch.rand(HEADS, 1, 1), learned=False),
        ),
        0,
    ),
    "mean over heads": (attention(score=lambda s, w, x: w.softmax(-1).mean(1, keepdim=True).expand_as(w)), 0),
    "talking heads": (
        attention(
            score=lambda s, w, x: s.talk(w.transpose(1, -1)).transpose(1, -1).softmax(-1),
            more=child("talk", lambda: nn.Linear(HEADS, HEADS)),
        ),
        0,
    ),
    "talking heads, fixed": (
        attention(
            score=lambda s, w, x: torch.einsum("bhqk,hg->bgqk", w, s.talk).softmax(-1),
            more=has("talk", lambda: torch.randn(HEADS, HEADS), learned=False),
        ),
        0,
    ),
    "softmax over heads": (attention(score=lambda s, w, x: w.softmax(1)), 0),
    "heads in order": (attention(join=lambda s, y, x: y.flip(1)), 0),
    "heads in a chain": (attention(join=lambda s, y, x: y.cumsum(1)), 0),
    "all heads counted": (attention(_fixed_count), 2),
    "heads counted": (attention(lambda s, q, k, v, x: (q / s.num_heads, k, v)), 2),
    "heads counted outside": (lambda: Counting(lambda: Block(Attention(), None)), 2),
    "sharp": (attention(score=lambda s, w, x: (w / w.shape[1]).softmax(-1)), 0),
    "a memory": (lambda: Remembering(lambda: NormedMemory()), 4),
    "a memory, normed": (lambda: Remembering(FunctionalMemory), 4),
    # One weight in several places.
    "scaled embedding, tied": (scaled, 4),
    "scaled embedding": (lambda: scaled(tied=False), 4),
    "embedding multiplied": (lambda: SelfTied(lambda: Block(None, MLP(gelu, None))), 2),
    "three places": (three_places, 4),
    "tied maps": (tied_mlps, 2),
    "tied to the outside": (tied_to_the_outside, 1),
    # Positions.
    "cumsum of positions": (lambda: Model(lambda: Mixing(Attention(), MLP(gelu, None))), 4),
    "mean of positions": (lambda: Model(lambda: MeanOf(Attention(), MLP(gelu, None))), 4),
    "positions shifted": (lambda: Model(lambda: Shifting(Attention(), MLP(gelu, None))), 4),
    "the first position": (lambda: Model(lambda: FirstOf(Attention(), MLP(gelu, None))), 4),
    "a learned mask": (lambda: Model(lambda: LearnedMask(None, MLP(gelu, None))), 4),
}  # fmt: skip
