"""Test that the proof refuses each wrong plan that replaces a right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.data.batch import call
from nbkit.rank.parallel.tensor.plan.choose_plan import candidates
from nbkit.rank.parallel.tensor.plan.plan import Heads, Pair
from nbkit.rank.parallel.tensor.proof import prove as proof_module
from nbkit.rank.parallel.tensor.proof.capture import data_flow
from nbkit.rank.parallel.tensor.proof.prove import prove
from verify.models import tensor_odd as odd
from verify.models.between import INNER, MLP, MODELS, Attention, Block, Model, gelu
from verify.models.specimens import HEADS, VOCAB, WIDTH, hf_llama

IDS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(0))


class Gated(nn.Module):
    """An MLP that computes down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class PackedGate(nn.Module):
    """A gated MLP with gate and up after each other in one map."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Past(MLP):
    """An MLP whose values between its maps are also added after the last map."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return x + self.down(h) + h[..., : x.shape[-1]]


class Twice(MLP):
    """An MLP that adds the bias of its last map twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down.bias


class Shared(Model):
    """A model whose output is scaled by values between the maps of its MLPs."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        aside = x.new_zeros(())
        for block in self.blocks:
            h = block.mlp.up(x)  # type: ignore[union-attr, operator]
            aside = aside + h.mean()
            x = x + block.mlp.down(F.gelu(h))  # type: ignore[union-attr, operator]
        return self.head(x) * aside  # type: ignore[no-any-return]


def mlp(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Model(lambda: Block(None, make()))


def attention() -> nn.Module:
    return Model(lambda: Block(Attention(), None))


def of_blocks(column: str, row: str, inner: int, widths: tuple[int, ...] | None = None, owner: str = "mlp") -> Any:
    """Return a plan that pairs maps in each block, without regard to what they compute."""

    def plant(pairs: list[Pair]) -> list[Pair]:
        each = []
        for number in range(2):
            dot = f"blocks.{number}.{owner}." if owner else f"blocks.{number}."
            columns = tuple(dot + name for name in column.split())
            of = dict.fromkeys(columns, widths or (inner,))
            each.append(Pair(dot[:-1], "mlp", columns, (dot + row,), of, inner))
        return each

    return plant


def changed(**fields: Any) -> Any:
    """Return a plan of the right pairs with changed fields: each is a value, or a function of the pair."""

    def plant(pairs: list[Pair]) -> list[Pair]:
        values = [{k: v(pair) if callable(v) else v for k, v in fields.items()} for pair in pairs]
        return [replace(pair, **each) for pair, each in zip(pairs, values, strict=True)]

    return plant


def first_columns(many: int) -> Any:
    def plant(pairs: list[Pair]) -> list[Pair]:
        return [replace(p, columns=p.columns[:many], widths={c: p.widths[c] for c in p.columns[:many]}) for p in pairs]

    return plant


def whole_widths(pair: Pair) -> dict[str, tuple[int, ...]]:
    return {path: (sum(widths),) for path, widths in pair.widths.items()}


def reversed_widths(pair: Pair) -> dict[str, tuple[int, ...]]:
    return {path: (sum(widths) // 4, sum(widths) // 4 * 3) for path, widths in pair.widths.items()}


UP_DOWN = of_blocks("up", "down", INNER)

PLANTED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    # A split between maps that need all features, or all heads.
    "softmax over the split": (MODELS["softmax"][0], UP_DOWN),
    "a norm over the split": (MODELS["rms"][0], UP_DOWN),
    "a norm that has no gradient": (MODELS["a norm that nothing goes through"][0], UP_DOWN),
    "features in order": (MODELS["cumsum"][0], UP_DOWN),
    "in evaluation only": (MODELS["in evaluation only"][0], UP_DOWN),
    "a vector that is not cut": (MODELS["a vector of features"][0], UP_DOWN),
    "ALiBi": (MODELS["alibi"][0], None),
    "a mean over heads": (MODELS["mean over heads"][0], None),
    # A reduction is missing.
    "what leaves between the maps": (mlp(lambda: Past(gelu, None)), UP_DOWN),
    "a part in the loss": (lambda: Shared(lambda: Block(None, MLP(gelu, None))), UP_DOWN),
    "a gradient of the input": (MODELS["an agreement with the input"][0], UP_DOWN),
    "a scalar inside and outside": (MODELS["a slope inside and outside"][0], UP_DOWN),
    "a scalar of somebody else": (MODELS["a gate from outside"][0], of_blocks("up", "down", INNER, owner="")),
    # A matrix is cut in the wrong places.
    "gate and up as one": (mlp(PackedGate), changed(widths=whole_widths)),
    "one as gate and up": (mlp(lambda: MLP(gelu, None)), changed(widths=reversed_widths)),
    "query, key and value as one": (odd.Packed, changed(widths=whole_widths, views=True)),
    "heads as query, key and value": (
        odd.per_head,
        changed(widths=lambda p: dict.fromkeys(p.columns, (WIDTH,) * 3), counts=("n_head",)),
    ),
    "the other way round": (mlp(lambda: MLP(gelu, None)), of_blocks("down", "up", WIDTH)),
    # A map is forgotten.
    "a gate that stays whole": (mlp(Gated), first_columns(1)),
    "values that stay whole": (attention, first_columns(2)),
    # Heads are counted wrong.
    "heads that nobody divides": (attention, changed(counts=())),
    "twice the heads": (attention, changed(heads=Heads(2 * HEADS, 2 * HEADS, WIDTH // HEADS // 2), counts=())),
    "a width divided as heads": (lambda: hf_llama(2), changed(counts=(":head_dim",))),
    # A weight is used elsewhere too.
    "a weight that is read": (MODELS["weight read"][0], UP_DOWN),
    "a bias added twice": (mlp(lambda: Twice(gelu, None)), UP_DOWN),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_plan_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, plant = PLANTED[name]
    torch.manual_seed(0)
    model = make().double()

    def run() -> Any:
        return call(model, IDS)

    right = prove(model, run, [2])
    plan = candidates(model, 1, None, data_flow(model, run))
    proven = right.of(2)
    assert proven is not None
    known = [proven.ways.get(pair.rows[0], pair) for pair in plan.pairs]
    kind = [pair for pair in known if pair.kind == "attention" or not any(p.kind == "attention" for p in known)]
    wrong = plant(kind) if plant is not None else kind
    assert wrong
    monkeypatch.setattr(proof_module, "candidates", lambda *_: replace(plan, pairs=tuple(wrong), ways={}, singles={}))
    monkeypatch.setattr(proof_module, "ways_of", lambda model, ways, size, reads: list(ways))
    verdict = prove(model, run, [2]).of(2)

    assert verdict is not None and verdict.ways == {}, name
    assert verdict.wrong.keys() == {pair.rows[0] for pair in wrong}


def test_the_same_pairs_are_accepted_in_models_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, plant in ((mlp(lambda: MLP(gelu, None)), UP_DOWN), (mlp(Gated), of_blocks("gate up", "down", INNER))):
        model = make().double()
        wrong = tuple(plant([]))
        plan = candidates(model, 1, None, data_flow(model, lambda model=model: model(IDS)))
        monkeypatch.setattr(proof_module, "candidates", lambda *_, p=plan, w=wrong: replace(p, pairs=w, ways={}))
        verdict = prove(model, lambda model=model: model(IDS), [2]).of(2)
        assert verdict is not None and verdict.wrong == {} and len(verdict.ways) == 2
