"""Test levers of the data axis: equal sums, sums with a bounded error, and replicas that train separately."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import SEED, asked_for, flat, mean_loss, points, quiet, weighted_loss
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.bridge.training_requests import TrainingRequestHandler
from nbkit.notebook.cluster.training_control import ControlResult
from nbkit.rank.telemetry import collectives

pytestmark = pytest.mark.usefixtures("known_to_be_right")
RANKS, ROWS = 3, 12


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 90), nn.Tanh(), nn.Linear(90, 3))


class Momentum(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)


class Still(torch.optim.SGD):
    """SGD that changes nothing, and adds up its gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.first, self.sum = torch.zeros(0), torch.zeros(())

    def step(self, closure: Any = None) -> None:
        grads = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])
        self.first = self.first if len(self.first) else grads
        self.sum = self.sum + grads
        super().step()


def trained(strategy: str, **changed: Any) -> Any:
    return quiet(strategy=strategy, **{"batch_size": ROWS, "optimizer": Momentum, "model": wide} | changed)


def sent(trainer: Any, steps: int) -> tuple[float, int, set[str]]:
    """Return (bytes that this rank sends along dp, messages, operations) of `steps` steps, from telemetry."""
    begin = collectives.ring.end
    trainer.fit(steps)
    calls, lost = collectives.ring.between(begin, collectives.ring.end)
    assert not lost
    # The numbers of a step (some hundred bytes) and the kilobyte that compares settings do not count.
    calls = [call for call in calls if call.bytes > 1024]
    each = {"all_reduce": 2 * (RANKS - 1) / RANKS, "all_gather": RANKS - 1, "all_to_all": (RANKS - 1) / RANKS}
    return sum(call.bytes * each[call.op] for call in calls), len(calls), {call.op for call in calls}


class Adam(torch.optim.Adam):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)


def all_of(trainer: Any) -> tuple[Tensor, Tensor]:
    """Return the weights and the optimizer state."""
    state = trainer.optimizer.inner.state.values()
    return flat(trainer.model), torch.cat([each["momentum_buffer"].flatten() for each in state])


def exact(world: Any) -> dict[str, Any]:
    collectives.set_mode("count")
    found = {}
    for strategy in ("ddp", "ddp bucket=4K", "zero1 bucket=4K"):
        trainer = trained(strategy, loss=weighted_loss)
        found[strategy] = trainer.fit(2), sent(trainer, 2)[1] if "zero" not in strategy else 0
    return {strategy: ([each["loss"] for each in records], calls) for strategy, (records, calls) in found.items()}


def rounded(world: Any) -> dict[str, Any]:
    """Reduce the same gradients many times over."""
    collectives.set_mode("count")
    found: dict[str, Any] = {}
    for strategy in ("ddp", "ddp compress=bf16", "ddp compress=int8 bucket=16K"):
        trainer = trained(strategy, optimizer=Still, data=points(ROWS), loading=nbkit.Loading(shuffle=False))
        trainer.fit(1)
        bytes_, _, ops = sent(trainer, 8)
        inner = trainer.optimizer.inner
        found[strategy] = bytes_ / 8, ops, inner.first, inner.sum / 9, trainer.job.sharded_model.notes
    return found


def apart(folder: Path, world: Any) -> dict[str, Any]:
    collectives.set_mode("count")
    trainer = trained("ddp sync_every=4", loading=nbkit.Loading(shuffle=False), clip_norm=1e9)
    trainer.fit(1)  # ends with an average of the replicas
    one = flat(trainer.model)
    found: dict[str, Any] = {"one": one, "norm": trainer.history[0]["grad_norm"]}
    trainer.fit(1)
    found["two"] = flat(trainer.model)
    adaptive = trained("ddp sync_every=2", loading=nbkit.Loading(shuffle=False), optimizer=Adam, data=points(ROWS * 4))
    adaptive.fit(2), adaptive.fit(2)
    found["adaptive"] = flat(adaptive.model)
    found["bytes"], _, found["ops"] = sent(trainer, 8)
    trainer.switch("ddp")
    found["switched"] = all_of(trainer)
    trainer.fit(2)
    trainer.switch("ddp compress=int8")
    trainer.fit(2)
    trainer.switch("ddp sync_every=4")
    seen: list[Tensor] = []
    trainer._callbacks = (lambda trainer, _: seen.append(flat(trainer.model)),)
    trainer.fit(3)
    found["seen"], found["end"] = seen[-1], flat(trainer.model)
    found["evaluated"] = trainer.evaluate(points(), batch_size=8)
    found["losses"] = [record["loss"] for record in trainer.history]
    # Switch during training, between two averages, and back.
    trainer = trained("ddp", switches={0: "ddp sync_every=4", 2: "ddp compress=int8", 4: "ddp"})
    trainer.fit(6)
    found["live"] = [record["strategy"] for record in trainer.history], *all_of(trainer)
    trainer = trained("ddp sync_every=4", checkpoints=nbkit.Checkpoints(every=2, path=folder))
    trainer.fit(2)
    found["saved"] = all_of(trainer)
    trainer.fit(1)
    trainer.load(folder)
    found["loaded"] = all_of(trainer)
    return found


def switched(world: Any) -> dict[str, Any]:
    """Switch like a notebook, then like a program. Return the answers and the warnings."""
    trainer, controls = trained("ddp"), TrainingRequestHandler()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = [asked_for(trainer, controls, strategy) for strategy in ("ddp compress=bf16", "ddp")]
        for strategy in ("ddp compress=bf16", "ddp", "ddp sync_every=2"):
            trainer.switch(strategy)
    return {"said": said, "warned": [str(each.message) for each in caught]}


def test_a_switch_warns_once_if_losses_will_differ_from_one_process() -> None:
    for found in run_ranks(switched, 2):
        rounded_, plain = found["said"]
        assert [each.split(":")[0] for each in rounded_["deviations"]] == ["compress=bf16"]
        assert "at most 1/256 of itself" in rounded_["deviations"][0] and plain["deviations"] == []
        assert [warning.split(":")[0] for warning in found["warned"]] == ["compress=bf16", "sync_every=2"]
        told = ControlResult(**rounded_)
        assert repr(told).splitlines()[-1].strip() == rounded_["deviations"][0] and "1/256" in told._repr_html_()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return all(map(_equal, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else bool(one == other)


@pytest.mark.long
def test_buckets_of_another_size_give_the_same_sums() -> None:
    for found in run_ranks(exact, RANKS):
        losses, calls = found["ddp"]
        assert found["ddp bucket=4K"][0] == pytest.approx(losses, rel=1e-6)
        assert found["zero1 bucket=4K"][0] == pytest.approx(losses, rel=1e-6)
        assert found["ddp bucket=4K"][1] > calls


@pytest.mark.long
def test_rounded_gradients_stay_within_their_bound_and_feed_errors_back() -> None:
    for found in run_ranks(rounded, RANKS):
        bytes_, _, first, mean, _ = found["ddp"]
        largest = float(first.abs().max())

        for strategy, share, bound in (("bf16", 0.5, 2 / 256), ("int8 bucket=16K", 0.25, 2 / 254)):
            sent_, ops, rounded_, mean_, _ = found[f"ddp compress={strategy}"]
            assert ops == {"all_to_all", "all_gather"}
            assert share * bytes_ < sent_ <= 1.03 * share * bytes_
            # A rank's own gradients may be larger than their sum.
            assert 0 < (rounded_ - first).abs().max() <= 3 * bound * largest
        # Without error feedback, each step and the mean of nine would have the same error.
        assert (mean_ - mean).norm() < 0.3 * (rounded_ - first).norm()


def by_hand(kind: Any, begin: Any, data: Any, *, every: int, slow: float) -> list[Tensor]:
    """Return the weights after each average of replicas of one process."""
    replicas = [wide() for _ in range(RANKS)]
    for model in replicas:
        model.load_state_dict(begin)
    optimizers, found = [kind(model) for model in replicas], []
    weights, moved = flat(replicas[0]), torch.zeros(())
    for step in range(len(data) // ROWS):
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            rows = data[step * ROWS + rank * ROWS // RANKS : step * ROWS + (rank + 1) * ROWS // RANKS]
            optimizer.zero_grad()
            mean_loss(model(torch.stack([x for x, _ in rows])), torch.stack([y for _, y in rows])).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            mean = torch.stack([flat(model) for model in replicas]).mean(0)
            moved = mean - weights + slow * moved
            weights = weights + moved
            found.append(weights)
            for model in replicas:
                nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return found


@pytest.mark.long
def test_replicas_train_separately_between_averages(tmp_path: Path) -> None:
    data = points(ROWS * 3)
    ranks = run_ranks(partial(apart, tmp_path / "saved"), RANKS)
    torch.manual_seed(SEED)
    begin = wide().state_dict()
    one, two = by_hand(Momentum, begin, data[: 2 * ROWS], every=1, slow=0.0)
    slow = 1 - RANKS**-0.5  # momentum of the previous movement
    adaptive = by_hand(Adam, begin, points(ROWS * 4), every=2, slow=slow)[-1]
    size = 4 * sum(p.numel() for p in wide().parameters())

    for found in ranks:
        torch.testing.assert_close(found["loaded"], found["saved"], rtol=0, atol=0)
        torch.testing.assert_close(found["one"], one)
        torch.testing.assert_close(found["two"], two)
        torch.testing.assert_close(found["adaptive"], adaptive)
        assert found["ops"] == {"all_reduce"}
        # Eight steps have two averages.
        assert found["bytes"] == pytest.approx(2 * (2 * (RANKS - 1) / RANKS) * size, rel=1e-6)
        for key in ("two", "adaptive", "switched", "end", "losses", "evaluated", "norm", "live", "loaded"):
            assert _equal(found[key], ranks[0][key]), key
        assert found["losses"][-1] < found["losses"][0]
    strategies = [f"dp=3{lever}" for lever in (" sync_every=4", " compress=int8", "") for _ in range(2)]
    assert ranks[0]["live"][0] == strategies
    assert not torch.equal(ranks[0]["seen"], ranks[1]["seen"])
