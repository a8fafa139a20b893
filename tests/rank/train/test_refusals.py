"""Test that a job that cannot train raises an error before training: what, the numbers, what to type next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import Recording, dict_loss, net, points, quiet
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import nbkit
from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.data.batch import BatchSplit
from nbkit.strategy import Strategy


class Running(nn.Module):
    """A model with its own running mean of the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch = x.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * self.scratch
        return x - self.mean


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # an import at the top would cost each worker a second

    return fully_shard(model)


class Experts(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        layer: Any = net()
        layer.experts, layer.router = nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 1)
        self.append(layer)


DICTS = [{"input": x, "label": y} for x, y in points()]

# name -> (arguments of the Trainer, words of the message)
AT_ONCE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no parameters": ({"model": nn.Tanh()}, ["no parameters to train", "Tanh: 0 parameters"]),
    "all frozen": ({"model": lambda: net().requires_grad_(False)}, ["no parameters to train", "all frozen"]),
    "no module": ({"model": lambda: 3}, ["not a torch module", "got int"]),
    "meta": ({"model": lambda: nn.Linear(2, 2, device="meta")}, ["meta device", "weight"]),
    "ranks do not divide": ({"batch_size": 7}, ["by the number of ranks", "7 / dp 2 = 3.5", "batch_size=8 or 6"]),
    "smaller than dp": ({"batch_size": 1}, ["smaller than the number of ranks", "1 / dp 2", "batch_size=2"]),
    "micro-batch": (
        {"compute": nbkit.Compute(microbatch_size=3)},
        ["cannot be divided evenly", "8 / dp 2 = 4", "microbatch_size 3", "fitting: 1, 2, 4"],
    ),
    "dataset too small": ({"data": points(5)}, ["smaller than one global batch", "5 samples, batch_size 8"]),
    "no data": ({"data": 3}, ["neither map-style nor iterable", "int"]),
    "no optimizer": ({"optimizer": lambda model: None}, ["did not return a torch optimizer", "NoneType"]),
    "optimizer of another": ({"optimizer": lambda model: Recording(net())}, ["not in this model", "4 of 4"]),
    "strategy": ({"strategy": "tp=3"}, ["the world", "2"]),
    "precision": ({"precision": "fp8"}, ["no precision 'fp8'"]),
    "clip": ({"clip_norm": 0}, ["clip_norm", "0"]),
    "schedule": ({"lr_schedule": lambda optimizer: optimizer.lr}, ["not a function of the step", "AttributeError"]),
    "nowhere to save": (
        {"checkpoints": nbkit.Checkpoints(every=2)}, ["no directory for", "nbkit.Checkpoints(every=2, path='model')"]
    ),
    "contrastive": (
        {"loss": lambda out, _: (out @ out.T).softmax(1).diagonal().log().mean().neg()},
        ["no mean over rows", "16 rows", "together; each alone: ", "(loss.sum(), mask.sum())", "contrastive"],
    ),
    "a sum": ({"loss": lambda out, _: out.square().sum()}, ["no mean over rows"]),
    "experts": ({"model": Experts, "strategy": "tp"}, ["'0' is a mixture of experts", "tp 2", "strategy='ddp'"]),
    "in DDP": (
        {"model": lambda: DistributedDataParallel(net())}, ["wrapped in DistributedDataParallel", "model=ddp.module"]
    ),
    "sharded": ({"model": lambda: sharded(net())}, ["FSDP", "before fully_shard"]),
    "a loader": ({"data": DataLoader(points(), batch_size=4)}, ["is a DataLoader", "data=loader.dataset"]),
    "no whole batch": ({"batch_size": 8.0}, ["batch_size must be a whole number", "8.0"]),
    "no option": ({"checkpoints": 500}, ["takes nbkit.Checkpoints", "checkpoints=nbkit.Checkpoints(every="]),
}  # fmt: skip
IN_FIT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no scalar": ({"loss": lambda out, target: out - 1}, ["not a scalar", "shape (4, 3), for 4 rows", "loss.mean()"]),
    "no tensor": ({"loss": lambda out, target: 1.0}, ["not a scalar", "float"]),
    "three parts": ({"loss": lambda out, target: (out.sum(), 1, 2)}, ["not (sum, weight)", "3 parts"]),
    "vector weight": ({"loss": lambda out, target: (out.sum(), target)}, ["weight of the loss", "shape (4,)"]),
    "dicts without inputs": (
        {"data": DICTS, "loss": dict_loss},
        ["dicts with inputs=", "keys input, label", "inputs="],
    ),
    "inputs not there": ({"data": DICTS, "inputs": ["x"]}, ["not in the batch", "missing x", "input, label"]),
    "inputs of pairs": ({"inputs": ["x"]}, ["not in the batch", "a list"]),
    "sparse": (
        {"model": lambda: nn.Embedding(8, 3, sparse=True), "data": [(torch.tensor(1), torch.tensor(0))] * 8},
        ["sparse", "weight"],
    ),
    "sparse, accumulated": (
        {
            "model": lambda: nn.Embedding(8, 3, sparse=True),
            "data": [(torch.tensor(1), torch.tensor(0))] * 8,
            "compute": nbkit.Compute(microbatch_size=2),
        },
        ["sparse", "weight"],
    ),
    "detached": ({"loss": lambda out, target: out.detach().mean()}, ["does not depend on the model"]),
    "nan weight": ({"loss": lambda out, target: (out.sum(), torch.tensor(float("nan")))}, ["finite on ranks 0, 1"]),
    "drifting": ({"model": lambda: nn.Sequential(net(), Running())}, ["buffer '1.mean'", "ranks 0, 1", "1 such"]),
    "no sense": ({"data": [torch.zeros(6)] * 8}, ["neither (input, target) nor dicts", "Tensor"]),
}


def refusals(world: Any) -> dict[str, str]:
    found = {}
    for name, (asked, _) in {**AT_ONCE, **IN_FIT}.items():
        before: torch.Tensor | None = None
        try:
            trainer = quiet(**asked)
            before = next(iter(trainer.model.parameters())).clone()
            trainer.fit(1)
        except NbkitError as error:
            found[name] = ("" if before is None or name in IN_FIT else "too late: ") + str(error)
            if before is not None:
                assert torch.equal(before, next(iter(trainer.model.parameters())))
                assert trainer.step == 0
    quiet().fit(1)
    return found


def test_every_refusal_has_what_and_numbers_and_the_world_stays_usable() -> None:
    found = run_ranks(refusals, 2)

    assert found[0] == found[1]
    for name, (_, words) in {**AT_ONCE, **IN_FIT}.items():
        assert [word for word in words if word not in found[0].get(name, "")] == [], (name, found[0].get(name))
        assert "→" in found[0][name] or name == "precision", name


def grown(world: Any) -> list[Any]:
    trainer = quiet(lr_schedule=lambda step: 0.5)
    last = trainer.optimizer.param_groups[0]["params"].pop()
    trainer.fit(1)
    trainer.optimizer.add_param_group({"params": [last], "lr": 0.2})
    trainer.fit(1)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    trainer.model.append(nn.Linear(3, 3))
    trainer.optimizer.add_param_group({"params": trainer.model[-1].parameters()})
    with pytest.raises(TrainingError) as raised:
        trainer.fit(1)
    return [rates, str(raised.value)]


def test_new_parameters_are_refused_and_new_groups_of_known_ones_scheduled() -> None:
    for rates, message in run_ranks(grown, 2):
        assert rates == pytest.approx([0.05, 0.1])
        assert "added after the job was built" in message and "4.weight" in message and "in the optimizer: 2" in message
        assert "again around the changed model" in message


def half_frozen() -> nn.Module:
    made: Any = net()
    made[0].requires_grad_(False)
    return made  # type: ignore[no-any-return]


def thawed_late(world: Any) -> list[str]:
    """Return the errors where parameters that were frozen come into the optimizer between two steps."""
    said = []
    for strategy in ("zero1", "zero2"):
        trainer = quiet(
            model=half_frozen,
            optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            strategy=strategy,
        )
        trainer.fit(1)
        trainer.optimizer.add_param_group({"params": list(trainer.model[0].requires_grad_(True).parameters())})
        with pytest.raises(TrainingError) as raised:
            trainer.fit(1)
        said.append(str(raised.value))
    return said


def test_parameters_added_to_the_optimizer_later_are_refused_with_advice() -> None:
    for rank in run_ranks(thawed_late, 2):
        assert all("also frozen ones" in said and "in the optimizer: 2" in said for said in rank)


def different_models(world: Any) -> str:
    with pytest.raises(TrainingError) as raised:
        quiet(model=lambda: nn.Linear(6, 3 + world.place.rank))
    return str(raised.value)


def test_ranks_that_build_different_models_get_the_difference() -> None:
    found = run_ranks(different_models, 2)

    assert found[0] == found[1]
    assert "Rank 1 built a different model" in found[0] and "(3, 6)" in found[0] and "(4, 6)" in found[0]


def counts(world: Any) -> list[str]:
    found = []
    for act in (
        lambda: quiet().fit(0),
        lambda: quiet().fit(2.5),
        lambda: quiet(eval_every=0),
        lambda: quiet().evaluate(),
    ):
        with pytest.raises(TrainingError) as raised:
            act()
        found.append(str(raised.value))
    return found


def test_counts_must_be_whole_and_positive() -> None:
    (found,) = run_ranks(counts, 1)

    assert "steps=0" in found[0] and "steps=2.5" in found[1] and "eval_every=0" in found[2] and "evaluate" in found[3]


def warned(world: Any) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(
            data=iter(points()),
            loading=nbkit.Loading(shuffle=False),
            eval_every=3,
            checkpoints=nbkit.Checkpoints(path="x", keep=2),
        )
    return [str(warning.message) for warning in caught]


def test_settings_without_effect_are_named() -> None:
    (found,) = run_ranks(warned, 1)

    assert [message.split()[0] for message in found] == ["shuffle=", "eval_every=", "path=", "keep="]


def test_the_batch_arithmetic_is_printed_in_one_line() -> None:
    assert str(BatchSplit.of(64, Strategy(dp=4), microbatch_size=8)) == "global 64 = micro 8 x accum 2 x dp 4"
    assert str(BatchSplit.of(64, Strategy(dp=4), microbatch_size=None)) == "global 64 = micro 16 x accum 1 x dp 4"


class WithTensor(nn.Module):
    def __init__(self, tensor: torch.Tensor, is_param: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        if is_param:
            self.odd = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        else:
            self.register_buffer("odd", tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


ODD_KINDS: dict[str, tuple[Any, str, str]] = {
    "sparse": (lambda: WithTensor(torch.eye(4).to_sparse()), "buffer 'odd' is sparse_coo", "to_dense()"),
    "csr": (lambda: WithTensor(torch.eye(4).to_sparse_csr()), "buffer 'odd' is sparse_csr", "to_dense()"),
    "expanded": (lambda: WithTensor(torch.ones(1).expand(6)), "one place in memory", "contiguous()"),
    "nested": (lambda: WithTensor(torch.nested.nested_tensor([torch.ones(2)])), "is nested", "to_padded_tensor"),
    "expanded parameter": (lambda: WithTensor(torch.ones(1).expand(6), True), "parameter 'odd' has", "contiguous()"),
    "sparse parameter": (lambda: WithTensor(torch.eye(4).to_sparse(), True), "parameter 'odd' is sparse", "to_dense"),
    "bool": (
        lambda: WithTensor(torch.ones(4, dtype=torch.bool), True),
        "'odd' is of bool",
        "register_buffer('odd', t)",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape", "model(example)"),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 3))), "scripted or traced", "compile=True"),
}


def odd_kinds(world: Any) -> dict[str, str]:
    found = {}
    for name, (make, *_) in ODD_KINDS.items():
        with pytest.raises(TrainingError) as raised:
            quiet(model=make)
        found[name] = str(raised.value)
    return found


def test_tensors_and_modules_of_odd_kinds_are_refused_by_name() -> None:
    for rank in run_ranks(odd_kinds, 2):
        for name, (_, what, hint) in ODD_KINDS.items():
            assert what in rank[name] and hint in rank[name].partition("→")[2], rank[name]
