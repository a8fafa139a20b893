"""Test that `nbkit.check` shows how a model would be split, and a job refuses by the same rules before it starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.errors import StrategyError
from nbkit.rank.train.trainer import Trainer
from verify.models.specimens import ZOO, gpt


def column(found: Any, name: str) -> dict[str, str]:
    at = found.columns.index(name)
    return {row[0]: row[at] for row in found.rows}


def test_check_lists_each_module_with_its_split_stage_and_data_axis() -> None:
    specimen = ZOO["llama"]
    model = specimen.build()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = nbkit.check(model, "tp=2 pp=2 dp=2 zero=3", specimen.batch(8))

    assert found.ok and found.findings == ()
    assert column(found, "tensor axis")["model.layers.*.self_attn.q_proj"] == "columns: 4 heads over 2"
    assert column(found, "tensor axis")["model.norm"] == "whole"
    assert column(found, "stage") == {
        row[0]: "0" if row[0] == "model.embed_tokens" else "0, 1" if ".layers." in row[0] else "1" for row in found.rows
    }
    assert set(column(found, "over dp").values()) == {"parameters, gradients, optimizer state over 2"}
    assert "model.layers.*.mlp.down_proj" in str(found) and "<td>lm_head</td>" in found._repr_html_()
    assert model.training and all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_tied_weight_is_on_all_its_stages_and_guesses_are_marked() -> None:
    tied = ZOO["gpt_tied"]
    assert column(nbkit.check(tied.build(), "pp=4", tied.batch(8)), "stage")["tokens"] == "0, 3"
    guessed = nbkit.check(ZOO["gpt"].build(), "pp=2")
    assert column(guessed, "stage") == column(nbkit.check(ZOO["gpt"].build(), "pp=2", ZOO["gpt"].batch(8)), "stage")
    assert guessed.ok and "without running it" in guessed.findings[0].what


def test_blocks_with_dropout_in_attention_are_split() -> None:
    model = gpt(1, dropout=0.1)
    split = column(nbkit.check(model, "tp=2", ZOO["gpt"].batch(8), loss=ZOO["gpt"].loss), "tensor axis")

    assert split["blocks.*.attention.q"] == "columns: 4 heads over 2" and split["blocks.*.up"].startswith("columns")


def frozen() -> nn.Module:
    model = gpt(2)
    model.tokens.requires_grad_(False)
    return model


# name -> (model, strategy, batch, world, fits, words)
SAID: dict[str, tuple[Any, str, Any, int | None, bool, list[str]]] = {
    "heads": (lambda: gpt(2, heads=6, width=48), "tp", 64, 4, False, ["6 heads / tp 4 = 1.5", "tp=1, 2, 3 or 6"]),
    "vocabulary": (lambda: gpt(2, vocab=99), "tp", 64, 2, True, ["99 rows of the embedding over tp 2 = 50+49"]),
    "stages": (lambda: gpt(10), "pp", 64, 4, True, ["10 blocks in 4 stages = 3+3+2+2"]),
    "few blocks": (lambda: gpt(2), "pp", 64, 4, False, ["pp 4 x 1 stage a rank = 4 stages, 2 blocks", "pp=2"]),
    "batch": (lambda: gpt(2), "ddp", 64, 3, False, ["batch_size 64 / dp 3 = 21.3", "batch_size=66 or 63"]),
    "micro-batches": (lambda: gpt(4), "pp microbatches=2", 64, 4, True, ["2 micro-batches, pp 4", "60% of a gpipe"]),
    "world": (lambda: gpt(2), "dp=4 tp=2", 64, 4, False, ["dp 4 x tp 2 = 8 ranks, the world has 4"]),
    "no effect": (lambda: gpt(2), "zero=3 tp=2", 64, 2, True, ["zero=3 has no effect with dp=1"]),
    "frozen": (frozen, "ddp", 64, 2, True, ["frozen: no gradient"]),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), "ddp", 8, 2, True, ["BatchNorm '1'"]),
    "no chain": (
        ZOO["sequential"].build,
        "pp=2",
        [torch.zeros(4, 7), torch.zeros(4)],
        2,
        False,
        ["nbkit found no blocks"],
    ),
}


def test_obstacles_are_reported_with_their_numbers() -> None:
    for name, (model, strategy, batch, world, fits, words) in SAID.items():
        found = nbkit.check(model, strategy, batch, world)
        assert [word for word in words if word not in str(found)] == [], (name, str(found))
        assert found.ok == fits, (name, str(found))
    with pytest.raises(StrategyError, match="there is no world"):
        nbkit.check(frozen, "ddp")


class Weighs(nn.Module):
    """A block whose attention returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.down(torch.relu(self.up(x)))


class ModelThatWeighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Weighs() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_attention_that_returns_its_weights_is_refused_under_tp_with_cp() -> None:
    def model() -> nn.Module:
        return ModelThatWeighs().double()

    ids = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    batch = [ids, ids.roll(-1, 1)]
    found = nbkit.check(model, "tp=2 cp=2", batch, 4, loss=ZOO["gpt"].loss)

    assert not found.ok
    assert "returns its weights cannot be split both by heads and by positions" in str(found)
    assert "need_weights=False; or a strategy with tp or cp alone" in str(found)
    assert nbkit.check(model, "tp=2", batch, 2, loss=ZOO["gpt"].loss).ok
    assert nbkit.check(model, "cp=2", batch, 2, loss=ZOO["gpt"].loss).ok


class Scores(nn.Module):
    """A model of one table and three blocks, of which each test changes something."""

    def __init__(self, max_norm: float | None = None, fades: bool = False) -> None:
        super().__init__()
        self.fades = fades
        self.tokens, self.head = nn.Embedding(32, 8, max_norm=max_norm), nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        if self.fades:
            self.tokens.weight.detach()[ids] *= 0.9
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def spectral() -> nn.Module:
    model = Scores()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block[0])
    return model


def compiled() -> nn.Module:
    return torch.compile(Scores(), backend="eager")  # type: ignore[return-value]


# (model, strategy) -> (the words of the cause, the words of the hint)
CAUSES: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "in place": (lambda: Scores(fades=True), "ddp", "its parameter 'tokens.weight' in place", "between two steps"),
    "in place, zero1": (lambda: Scores(fades=True), "zero1", "'tokens.weight' in place", "%cluster start -n 1"),
    "max_norm": (
        lambda: Scores(9.0),
        "ddp",
        "Embedding with max_norm=9",
        "get_parameter('tokens.weight').detach().renorm_(2, 0, 9)",
    ),
    "max_norm, cp": (lambda: Scores(9.0), "cp=2", "Embedding with max_norm=9", "in a callback of the Trainer"),
    "spectral": (spectral, "pp microbatches=2", "the buffer 'blocks.0.0.parametrizations.weight.0._u'", "'ddp'"),
    "compiled": (compiled, "zero3", "torch.compile compiled the model", "the model without torch.compile; or"),
}


def test_a_refusal_names_the_cause_and_only_a_strategy_that_is_not_refused_too() -> None:
    ids = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    for name, (model, strategy, cause, hint) in CAUSES.items():
        found = nbkit.check(model, strategy, [ids, ids.roll(-1, 1)], 2, loss=ZOO["gpt"].loss)
        refusal = next(finding for finding in found.findings if finding.error)
        assert cause in refusal.numbers + refusal.what and hint in refusal.hint, (name, str(refusal))
        assert ("'ddp'" in refusal.hint) == (name in ("spectral", "compiled")), (name, str(refusal))


def told(world: Any) -> dict[str, Any]:
    ids, target = ZOO["gpt"].batch(16)
    found: dict[str, Any] = {}
    for name, strategy, changed in (
        ("heads", "tp", {"model": lambda: gpt(2, heads=3, width=24)}),
        ("few blocks", "pp schedule=interleaved", {}),
        ("no effect", "pp microbatches=2", {"compute": nbkit.Compute(microbatch_size=2)}),
        ("fewer", "pp microbatches=1", {}),
    ):
        asked: dict[str, Any] = {
            "model": lambda: gpt(2),
            "loss": ZOO["gpt"].loss,
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "data": list(zip(ids, target, strict=True)),
            "batch_size": 8,
            "log_dir": None,
            "progress": False,
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Trainer(strategy=strategy, **(asked | changed))
                found[name] = [str(warning.message) for warning in caught]
            except StrategyError as error:
                found[name] = str(error)
    return found


@pytest.mark.long
def test_a_job_refuses_and_warns_by_the_same_rules_as_check() -> None:
    first, second = run_ranks(told, 2)

    assert first == second
    assert "3 heads / tp 2 = 1.5" in first["heads"]
    assert "pp 2 x 2 stages a rank = 4 stages, 2 blocks" in first["few blocks"]
    assert "microbatch_size= has no effect under pp=2" in " ".join(first["no effect"])
    assert "1 micro-batch, pp 2" in " ".join(first["fewer"])
