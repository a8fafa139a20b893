"""Test linear layers in fp8: strategies that divide rows train as one process, and tp is refused."""

from __future__ import annotations

import copy
import pickle
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.parallel.module import fp8
from nbkit.rank.train.trainer import Trainer
from verify.models.specimens import VOCAB, WIDTH, ZOO, cross_entropy, gpt, gpt_frozen, gpt_tied, padded_tokens


class Mixture(nn.Module):
    """A mixture with one of 16 experts per token, so its router has sizes for fp8. Some experts get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(16)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, choice = self.router(tokens).softmax(-1).max(-1)
        given = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = torch.where(choice == number)[0]
            given = given.index_add(0, chosen, expert(tokens[chosen]) * weights[chosen, None])
        return x + given.view_as(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {"gpt": gpt, "tied": gpt_tied, "frozen": gpt_frozen, "experts": Experts, "narrow": lambda: gpt(1, width=24)}


def trainer(strategy: str, model: str = "gpt", dtype: torch.dtype = torch.float64, **changed: Any) -> Trainer:
    """Return a trainer whose rows have unequal numbers of targets, so ranks have unequal weights."""
    rows, target = padded_tokens(24, torch.Generator().manual_seed(0))
    return Trainer(
        model=lambda: MODELS[model]().to(dtype),
        loss=cross_entropy,
        optimizer=lambda model: torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1),
        data=list(zip(rows["input_ids"], target, strict=True)),
        batch_size=6,
        strategy=strategy,
        seed=5,
        log_dir=None,
        progress=False,
        precision=changed.pop("precision", None),
        compute=nbkit.Compute(**{"fp8": True, "grad_norm_every": 1} | changed),
    )


def trained(world: Any, runs: list[tuple[str, dict[str, Any]]]) -> list[tuple[list[float], list[float], Any]]:
    """Return (losses, norms, weights) of each run. A run makes a step under each of its strategies."""
    found = []
    for strategies, changed in runs:
        first, *others = strategies.split(" > ")
        job = trainer(first, **changed)
        job.fit(1)
        for strategy in others or [first, first]:
            job.switch(strategy)
            job.fit(1)
        records = job.history
        weights = {name: p.double() for name, p in job.full_state_dict().items()}
        found.append(([each["loss"] for each in records], [each["grad_norm"] for each in records], weights))
    return found


def off(ours: Any, truth: Any) -> float:
    """Return the largest relative difference of losses, norms and weights."""
    pairs = zip([*ours[0], *ours[1]], [*truth[0], *truth[1]], strict=True)
    numbers = [abs(one - other) / other for one, other in pairs]
    size = max(float(p.abs().max()) for p in truth[2].values())
    return max(*numbers, *(float((ours[2][name] - p).abs().max()) / size for name, p in truth[2].items()))


RUNS = [
    ("cp=2", {"recompute": True}),
    ("ddp > zero3 > pp=2 microbatches=2", {}),
]
LONG = [
    ("ddp", {}),
    ("zero3", {"recompute": "selective"}),
    ("pp=2 microbatches=3", {}),
    ("zero1", {"model": "tied", "microbatch_size": 1}),
    ("zero2", {"model": "frozen"}),
    ("pp=2 schedule=zb microbatches=3", {"loss_chunks": 2}),
    ("cp=2", {"model": "tied"}),
    ("ep=2", {"model": "experts"}),
    ("zero3", {"model": "experts"}),
]


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("runs", [RUNS, pytest.param(LONG, marks=pytest.mark.long)])
def test_strategies_that_divide_rows_train_in_fp8_as_one_process(runs: list[tuple[str, dict[str, Any]]]) -> None:
    models = {changed.get("model", "gpt") for _, changed in runs}
    alone = [("ddp", {"model": model, "fp8": on}) for model in models for on in (True, False)]
    truths = run_ranks(trained, 1, alone, timeout=240)[0]
    truth = {(changed["model"], changed["fp8"]): each for (_, changed), each in zip(alone, truths, strict=True)}
    for ranks in run_ranks(trained, 2, runs, timeout=240):
        for (strategy, changed), ours in zip(runs, ranks, strict=True):
            model = changed.get("model", "gpt")
            assert off(ours, truth[model, True]) < 1e-10, (strategy, changed)
            assert off(ours, truth[model, False]) > 1e-6, (strategy, changed)


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("how", [False, *(pytest.param(how, marks=pytest.mark.long) for how in ("selective", True))])
def test_zero3_gathers_weights_in_the_dtype_of_autocast_and_computes_the_same(how: bool | str) -> None:
    """Compare losses in bf16. A different order of sums changes them less than a weight that is rounded twice."""
    changed = {"dtype": torch.float32, "precision": "bf16", "recompute": how}
    same = [("zero2", changed), ("zero3", changed)]
    for two, three in run_ranks(trained, 2, same, timeout=240):
        assert two[0][0] == three[0][0]
        assert off(two, three) < 1e-3


def tried(world: Any) -> list[str]:
    found, job = [], trainer("zero3")
    for strategy in ("tp=2", "cp=2", "tp=2"):
        job.fit(1)
        try:
            job.switch(strategy)
        except StrategyError as error:
            found.append(error.what)
    return [*found, str(job.strategy)]


def test_tp_with_fp8_is_refused_and_cp_is_accepted() -> None:
    refused = "With fp8=True, tp=2 does not give the results of one process."
    assert run_ranks(tried, 2, timeout=120) == [[refused, refused, "cp=2"]] * 2


def layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(32, 48).to(dtype)
    fp8.compute_in_fp8(nn.ModuleDict({"one": made}), ["one"], torch.device("cpu"))
    return made


def results(forward: Any, x: Tensor, grad: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of `x` and of `params`."""
    x = x.clone().requires_grad_()
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *params], grad)]


def test_parts_of_the_rows_and_scaled_gradients_give_the_same_results() -> None:
    one, draw = layer(torch.float64), torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, 5, size, dtype=torch.float64, generator=draw) for size in (32, 48))
    whole = results(one, x, grad, list(one.parameters()))
    parts = [results(one, x[i], 3 * grad[i], list(one.parameters())) for i in range(2)]
    torch.testing.assert_close(torch.stack([part[0] for part in parts]), whole[0])
    torch.testing.assert_close(torch.stack([part[1] for part in parts]) / 3, whole[1])
    for number in (2, 3):
        torch.testing.assert_close((parts[0][number] + parts[1][number]) / 3, whole[number])
    plain = results(lambda x: F.linear(x, one.weight, one.bias), x, grad, list(one.parameters()))
    # Three bits of a fraction mean an error of up to 1/16. The gradient of the weight is not rounded.
    assert 1e-2 < float((plain[0] - whole[0]).norm() / plain[0].norm()) < 1 / 16
    assert 1e-2 < float((plain[1] - whole[1]).norm() / plain[1].norm()) < 1 / 16
    torch.testing.assert_close(plain[2:], whole[2:])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_emulation_computes_the_same_as_torchao(dtype: torch.dtype, bound: float) -> None:
    pytest.importorskip("torchao")
    one, draw = layer(dtype), torch.Generator().manual_seed(1)
    x, grad = (torch.randn(7, size, dtype=dtype, generator=draw) for size in (32, 48))
    theirs = fp8.torchao_layer(one.weight, emulate=True)

    def by_torchao(x: Tensor) -> Tensor:
        return torch.func.functional_call(theirs, {"weight": one.weight}, (x,)) + one.bias

    every = (results(forward, x, grad, list(one.parameters())) for forward in (one, by_torchao))
    for ours, expected in zip(*every, strict=True):
        assert ours.dtype == expected.dtype
        assert float((ours - expected).norm() / expected.norm()) < bound


def test_missing_torchao_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(TrainingError, match="needs torchao") as refused:
        fp8.torchao_config()
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["fp8"]
    assert f"pip install '{wanted}'" in str(refused.value)


def test_a_copied_or_pickled_fp8_layer_computes_with_its_own_weight() -> None:
    one, x = layer(torch.float64), torch.ones(3, 32, dtype=torch.float64)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        torch.testing.assert_close(other(x), one(x))
        with torch.no_grad():
            other.weight.zero_()
        assert torch.equal(other(x), other.bias.expand(3, 48)) and not torch.equal(one(x), other(x))


def test_layers_of_blocks_compute_in_fp8_and_the_rest_is_counted() -> None:
    assert fp8.spelled_fp8(gpt()) == "fp8 in 24 of 25 linear layers; not 1 outside of the blocks, such as the head"
    found, without = fp8.fp8_layers(Experts())
    assert len(found) == 2 * 16 * 2 and without["routers of experts"] == 2
    found, without = fp8.fp8_layers(nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16), nn.Linear(16, 16)))
    assert not found and without["with sizes that are not multiples of 16"] == 2


def refused(world: Any) -> str:
    try:
        trainer("ddp", "narrow")
    except TrainingError as error:
        return str(error)
    return ""


def test_a_model_without_layers_for_fp8_is_refused() -> None:
    assert all("not 6 with sizes that are not multiples of 16" in each for each in run_ranks(refused, 2))


def compiled(world: Any) -> list[list[float]]:
    jobs = [trainer("ddp", compile=how) for how in ("aot_eager", False)]
    for job in jobs:
        job.fit(3)
    return [[record["loss"] for record in job.history] for job in jobs]


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_a_compiled_fp8_block_computes_the_same() -> None:
    ((one, other),) = run_ranks(compiled, 1, timeout=170)
    assert one == pytest.approx(other, rel=1e-12)


def used(world: Any, path: str) -> tuple[float, float, float, int]:
    """Return (loss of a trained model on other data, with loaded weights, without fp8, length of a generated text)."""
    first, data = trainer("zero3", dtype=torch.float32), [(row, row) for row in ZOO["gpt"].batch(6)[0]]
    first.fit(1)
    first.save(path)
    losses = [first.evaluate(data)]
    for on in (True, False):
        job = trainer("ddp", dtype=torch.float32, fp8=on)
        job.load(path)
        assert all(torch.equal(p, first.full_state_dict()[name]) for name, p in job.full_state_dict().items())
        losses.append(job.evaluate(data))
    length = len(first.generate(torch.zeros(2, dtype=torch.long), tokens=4))
    return losses[0], losses[1], losses[2], length


@pytest.mark.usefixtures("known_to_be_right")
def test_an_fp8_model_evaluates_generates_and_saves_weights_for_use_without_fp8(tmp_path: Any) -> None:
    for trained, loaded, without, length in run_ranks(used, 2, str(tmp_path / "saved"), timeout=170):
        assert trained == pytest.approx(loaded, rel=1e-9) and length == 6
        assert abs(without / trained - 1) > 1e-6
