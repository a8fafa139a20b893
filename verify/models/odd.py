"""Small language models that do something that their structure does not show.

Token ids (rows, LENGTH) -> logits (rows, LENGTH, VOCAB). `verdict` compares one with one process.
The tests of ZeRO 3 and of context parallelism use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nbkit.rank.parallel.whole_step import StepProof
from nbkit.rank.train import builder
from nbkit.rank.train import trainer as training
from verify.cases import Case
from verify.models.specimens import Specimen

VOCAB, WIDTH, HEADS, LENGTH = 24, 16, 4, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (y.view(rows, length, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, None, self.p, True)
        return self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Plain(nn.Module):
    """A block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln(x))


class LM(nn.Module):
    def __init__(self, layers: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))

    def through(self, x: Tensor, which: Sequence[int]) -> Tensor:
        for i in which:
            x = self.blocks[i](x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.ln(self.through(self.embed(ids), range(len(self.blocks)))))


class Doing(LM):
    """An LM whose forward is `how(model, hidden states of the embedding)`, followed by norm and head."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor], layers: int = 3, block: Any = Block) -> None:
        super().__init__(layers, block)
        self.how, self.gate = how, nn.Linear(WIDTH, WIDTH)
        self.scale, self.table = nn.Parameter(torch.full((3,), 0.7)), nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.how(self, self.embed(ids))
        return self.head(self.ln(x) + torch.tanh(x))  # which a factor changes, too


def doing(how: Callable[[Any, Tensor], Tensor], **built: Any) -> Callable[[], nn.Module]:
    return lambda: Doing(how, **built)


def squares(weights: Any) -> Tensor:
    return 1 + 1e-2 * sum(weight.pow(2).sum() for weight in weights)


def every(model: Any, x: Tensor) -> Tensor:
    return model.through(x, range(len(model.blocks)))


def ups(model: Any) -> list[Tensor]:
    return [block.mlp.up.weight for block in model.blocks]


# Weights that are used elsewhere than in the forward of their block.


def penalty(model: Any, x: Tensor) -> Tensor:
    return every(model, x) * squares(ups(model))


def penalty_before(model: Any, x: Tensor) -> Tensor:
    factor = squares(ups(model))
    return every(model, x) * factor


def penalty_between(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x) * squares([block.mlp.up.weight])
    return x


def penalty_of_all(model: Any, x: Tensor) -> Tensor:
    return every(model, x) * squares(model.parameters())


def logged(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        norm = model.blocks[0].attn.qkv.weight.norm()
    return every(model, x) * norm


def borrowed(model: Any, x: Tensor) -> Tensor:
    return F.linear(every(model, x), model.blocks[0].attn.out.weight)


def shapes(model: Any, x: Tensor) -> Tensor:
    weight = model.blocks[0].mlp.up.weight
    return every(model, x).to(weight.dtype) * (weight.shape[0] + weight.numel()) / 100


def parts_alone(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = x + block.attn(block.ln1(x))
        x = x + block.mlp(block.ln2(x))
    return x


def a_part_too(model: Any, x: Tensor) -> Tensor:
    return model.blocks[0].ln1(every(model, x)) + x


def frozen_inside(model: Any, x: Tensor) -> Tensor:
    model.blocks[1].requires_grad_(False)
    x = every(model, x)
    model.blocks[1].requires_grad_(True)
    return x


class Method(Block):
    def before(self, x: Tensor) -> Tensor:
        return self.ln1(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x) + self.mlp(self.ln2(x))


def other_method(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(block.before(x))
    return x


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self) -> Tensor:
        return self.weight


def given_weights(model: Any, x: Tensor) -> Tensor:
    for weight in [block().t() for block in model.blocks]:
        x = x + torch.tanh(F.linear(x, weight))
    return x


# Blocks that are called in other ways than once each, in order.


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.inner(x)
        return self(x, depth - 1) if depth else x + self.inner(x) / 2


def order(*which: int) -> Callable[[], nn.Module]:
    return doing(lambda model, x: model.through(x, which))


def without_gradient_first(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        hint = every(model, x)
    return every(model, x + hint)


def two_towers(model: Any, x: Tensor) -> Tensor:
    a, b = model.blocks[2](x), model.blocks[0](x)
    return model.blocks[1](a) + b


def in_one_segment(model: Any, x: Tensor) -> Tensor:
    return checkpoint(every, model, x, use_reentrant=False)


def gradient_inside(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        y = every(model, x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + torch.tanh(slope) / 10


class Itself(LM):
    def forward(self, ids: Tensor, depth: int = 1) -> Tensor:
        logits = super().forward(ids)
        return logits + self(ids.flip(1), depth - 1) if depth else logits


class NanoGPT(nn.Module):
    """The structure of nanoGPT: a ModuleDict that holds the list of blocks, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH), "drop": nn.Dropout(0.0)}
        self.transformer = nn.ModuleDict(
            {**parts, "h": nn.ModuleList(Block() for _ in range(3)), "ln_f": nn.LayerNorm(WIDTH)}
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        x = parts.drop(parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1])))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


class Recurrent(nn.Module):
    """An LSTM language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCAB)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(ids))[0])


class Albert(nn.Module):
    """A model that runs its only block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.block, self.head = nn.Embedding(VOCAB, WIDTH), Block(), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Pairs(nn.Module):
    """A ModuleList of ModuleLists."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), MLP(), nn.LayerNorm(WIDTH)]) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for attention, mlp, norm in self.layers:
            x = x + attention(x)
            x = x + mlp(norm(x))
        return self.head(x)


def one_mlp_for_all() -> nn.Module:
    model, shared = LM(), MLP()
    for block in model.blocks:
        block.mlp = shared
    return model


def hooked() -> nn.Module:
    model = LM()
    model.ln.register_forward_hook(lambda _, __, y: y * (1 + model.blocks[0].mlp.up.weight.norm() / 100))
    return model


def normed(wrap: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = LM()
        for block in model.blocks:
            wrap(block.mlp.up)
        return model

    return build


class Penalty:
    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights


def listed(kind: str) -> Callable[[], nn.Module]:
    """Return what builds a model that also holds its weights in a list, a dict of tuples, or an object."""

    def build() -> nn.Module:
        model = Doing(lambda model, x: every(model, x) * squares(model.held(model)))
        weights = ups(model)
        if kind == "list":
            model.decayed, model.held = weights, lambda model: model.decayed
        elif kind == "dict":
            model.decayed, model.held = {"all": (tuple(weights),)}, lambda model: model.decayed["all"][0]
        else:
            model.decayed, model.held = Penalty(weights), lambda model: model.decayed.weights
        return model

    return build


def in_place(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.clamp_(-0.1, 0.1)
    return every(model, x)


def renormed() -> nn.Module:
    model = LM()
    model.wte.max_norm = 1.0
    return model


# One process, and a job of two ranks.


def rows(num: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randint(VOCAB, (LENGTH,), generator=draw), torch.randint(VOCAB, (LENGTH,), generator=draw))
        for _ in range(num)
    ]


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, 1), target.flatten())


def penalised(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    return lambda output, target: cross_entropy(output, target) * squares(model.parameters())


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def _sample(num: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    ids, targets = (torch.randint(VOCAB, (num, LENGTH), generator=draw) for _ in range(2))
    return ids, targets


def verdict(
    make: Callable[[], nn.Module], strategy: str, *, loss_of: Any = None, seen: bool = True, first: str = ""
) -> tuple[str, str]:
    """Return ("equal" or "wrong", the difference), or ("refused", "late" or "crash", the text). The same on each rank.

    The job finds the facts that `strategy` needs, but proves no whole step: models that only this proof would refuse
    train. seen: the job has an example of the data. first: the strategy of a first step, before a switch.
    """
    from verify.compare import judged
    from verify.training import train, truth

    specimen = Specimen(make, _sample, cross_entropy, loss_of=loss_of)
    chain = f"{first} > {strategy}" if first else strategy
    case = Case(specimen, chain, steps=3 if first else 2, extras=frozenset({"sgd", "evaluate"}), ranks=2)
    found: Any
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "prove_step", lambda *_, **__: StepProof())
            if not seen:
                patch.setattr(training, "example_of", lambda *_: None)
            found = train(case)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if text := next((each for each in every if isinstance(each, str)), ""):
        return "crash", text
    if refused := found.refused.get(strategy):
        return "refused", refused
    told = judged(case, every, truth(case))
    return told.kind, told.text
