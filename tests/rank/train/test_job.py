"""Test that users with their own loop get the same training through stable handles."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from jobs import SEED, Recording, assert_same_gradients, dict_loss, mean_loss, net, one_process, points
from ranks import run_ranks
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import nbkit
from nbkit.errors import NotFinite, TrainingError
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.job import prepare


def looped(world: Any) -> dict[str, Any]:
    job = prepare(net, Recording, loss=mean_loss, seed=SEED, compute=nbkit.Compute(microbatch_size=2))
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.5)
    running = []
    for epoch in range(2):
        batches = [order_of(epoch)[at : at + 8] for at in range(0, 21, 8)]
        loader = DataLoader(points(21), batch_sampler=batches)
        for batch in job.batches(loader):
            running.append(step_boundary.training() is job)
            result = job.backward(batch)
            norm = job.clip(1e9)
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.log(loss=result.loss, twice=2 * result.loss, mine=epoch)
            running.append(float(norm) > 0)
        schedule.step()
    return {
        "history": [{k: v for k, v in r.items() if k != "seconds"} for r in job.history],
        "seen": job.optimizer.seen,
        "running": all(running) and step_boundary.training() is None,
        "lr": job.optimizer.param_groups[0]["lr"],
    }


def order_of(epoch: int) -> list[int]:
    return torch.randperm(21, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_loop_over_global_batches_equals_one_process(num_ranks: int) -> None:
    losses, optimizer, _ = one_process(points(21), steps=6)
    for found in run_ranks(looped, num_ranks):
        history = found["history"]
        assert [r["loss"] for r in history] == pytest.approx(losses, rel=1e-5)
        assert [r["twice"] for r in history] == pytest.approx([2 * loss for loss in losses], rel=1e-5)
        assert [r["grad_norm"] for r in history] == pytest.approx([float(g.norm()) for g in optimizer.seen], rel=1e-5)
        assert [(r["step"], r["mine"]) for r in history] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
        assert_same_gradients(found["seen"], optimizer.seen)
        assert found["running"] and found["lr"] == pytest.approx(0.05)


def shuffled(world: Any) -> list[float]:
    torch.manual_seed(world.place.rank)
    job = prepare(net, Recording, loss=mean_loss)
    for batch in job.batches(DataLoader(points(), batch_size=8, shuffle=True)):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [r["loss"] for r in job.history]


def test_a_loader_that_shuffles_gives_all_ranks_the_same_batches() -> None:
    first, second = run_ranks(shuffled, 2)

    assert first == second and len(first) == 4


def misused(world: Any) -> list[str]:
    found = []
    job = prepare(net, Recording, loss=mean_loss)
    batch = next(iter(DataLoader(points(), batch_size=8)))

    def twice() -> None:
        job.backward(batch)
        job.backward(batch)

    sampler = DistributedSampler(points(), num_replicas=2, rank=world.place.rank)
    for act in (
        lambda: job.log(x=1),
        twice,
        lambda: job.log(step=1, mine=2),
        lambda: job.log(mine=torch.zeros(2)),
        lambda: job.log(mine="abc"),
        lambda: next(job.batches(DataLoader(points(), batch_size=4, sampler=sampler))),
        lambda: job.backward([batch[0] + world.place.rank, batch[1]]),
    ):
        with pytest.raises(TrainingError) as raised:
            act()
        found.append(raised.value.what)
        job.optimizer.zero_grad()
    return found


def test_misuse_is_reported() -> None:
    first, second = run_ranks(misused, 2)

    assert first == second
    assert [message.split()[0] for message in first] == ["log()", "backward()", "log()", "log()", "log()", "The", "The"]
    assert "the record uses itself" in first[2] and "DistributedSampler" in first[5] and "different data" in first[6]


def clipped_by_torch(world: Any, strategies: list[str], clip: Any, of_optimizer: bool = False) -> list[Any]:
    """Return the losses under each strategy, or why torch did not clip. of_optimizer: clip its parameters."""
    found: list[Any] = []
    for strategy in strategies:
        example = next(iter(DataLoader(points(), batch_size=8)))
        job = prepare(
            net,
            Recording,
            loss=mean_loss,
            seed=SEED,
            strategy=strategy,
            hints=nbkit.ModelHints(example=example),
            log_dir=None,
        )
        try:
            for batch in job.batches(DataLoader(points(), batch_size=8)):
                job.backward(batch)
                groups = job.optimizer.param_groups
                clip([p for g in groups for p in g["params"]] if of_optimizer else job.model.parameters(), 0.01)
                job.optimizer.step()
                job.optimizer.zero_grad()
            found.append([record["loss"] for record in job.history])
        except TrainingError as error:
            found.append(str(error))
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_torchs_norm_clipping_equals_one_process_or_is_refused() -> None:
    clip = torch.nn.utils.clip_grad_norm_
    (alone,) = run_ranks(clipped_by_torch, 1, ["ddp"], clip)
    for ddp, zero1, *parts in run_ranks(clipped_by_torch, 2, ["ddp", "zero1", "zero3", "tp"], clip):
        assert ddp == pytest.approx(alone[0], rel=1e-5)
        assert "clip nothing" in zero1 and "job.clip" in zero1, zero1
        for said in parts:
            assert "a part of the gradients" in said and "job.clip" in said, said
    for (said,) in run_ranks(clipped_by_torch, 2, ["zero1"], clip, True):
        assert "a part of the gradients" in said, said


@pytest.mark.usefixtures("rows_are_known")
def test_torchs_value_clipping_equals_one_process_or_is_refused() -> None:
    clip = torch.nn.utils.clip_grad_value_
    (alone,) = run_ranks(clipped_by_torch, 1, ["ddp"], clip)
    for zero2, *others in run_ranks(clipped_by_torch, 2, ["zero2", "ddp", "zero3", "tp"], clip):
        assert "clip nothing" in zero2, zero2
        assert others == [pytest.approx(alone[0], rel=1e-5)] * 3
    for (losses,) in run_ranks(clipped_by_torch, 2, ["zero2"], clip, True):
        assert losses == pytest.approx(alone[0], rel=1e-5)


def broken_off(world: Any) -> list[int]:
    job = prepare(net, Recording, loss=dict_loss, inputs=["input"])
    batch = {"input": torch.zeros(8, 6), "label": torch.zeros(8, dtype=torch.long)}
    for number, _ in enumerate(job.batches([batch] * 10)):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if number == 3:
            break
    return [r["step"] for r in job.history]


def test_the_history_is_complete_after_a_break() -> None:
    assert run_ranks(broken_off, 2) == [[1, 2, 3, 4]] * 2


def left_by_errors(world: Any) -> list[Any]:
    nan = [(torch.full((6,), float("nan")), y) for _, y in points(8)]
    job = prepare(net, Recording, loss=mean_loss)
    kept = []
    for data, expected in ((points(16) + nan, NotFinite), (points(16), ZeroDivisionError)):
        with pytest.raises(expected):
            loop = job.batches(DataLoader(data, batch_size=8))
            for number, batch in enumerate(loop):
                job.backward(batch)
                job.optimizer.step()
                job.optimizer.zero_grad()
                if expected is ZeroDivisionError and number == 1:
                    1 / 0  # noqa: B018
        # A variable refers to the loop, as in a notebook.
        kept.append((loop, step_boundary.training() is None))
    for batch in job.batches(DataLoader(points(8), batch_size=8)):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [[r["step"] for r in job.history], kept[0][1], step_boundary.training() is None]


def test_a_loop_that_ended_with_an_error_does_not_prevent_the_next() -> None:
    assert run_ranks(left_by_errors, 2) == [[[1, 2, 3, 4, 5], True, True]] * 2


def with_dropout(world: Any) -> list[float]:
    job = prepare(lambda: net(dropout=0.5), Recording, loss=mean_loss)
    batch = next(iter(DataLoader(points(), batch_size=8)))
    torch.manual_seed(world.place.rank)
    result = job.backward(batch)
    job.optimizer.zero_grad()
    torch.rand(11)
    return [float(result.loss), float(job.backward(batch).loss)]


def test_a_repeated_step_draws_the_same_numbers() -> None:
    first, second = run_ranks(with_dropout, 2)

    assert first == second and first[0] == first[1]


def without_batches(world: Any) -> list[int]:
    job = prepare(net, Recording, loss=mean_loss)
    for batch in DataLoader(points(), batch_size=8):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [r["step"] for r in job.history]


def test_a_loop_without_job_batches_has_a_history_too() -> None:
    assert run_ranks(without_batches, 2) == [[1, 2, 3, 4]] * 2


def under_autocast(world: Any) -> list[torch.dtype]:
    seen: list[torch.dtype] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(output.dtype)
        return mean_loss(output, target)

    job = prepare(net, Recording, loss=loss)
    batch = next(iter(DataLoader(points(), batch_size=8)))
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            job.backward(batch)
        job.optimizer.zero_grad()
    return seen


def test_an_autocast_around_backward_stays_on() -> None:
    assert run_ranks(under_autocast, 1) == [[torch.bfloat16, torch.float32]]


class TwoKinds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.brief = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.full = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] * self.full + self.brief.float()


def divided(world: Any) -> list[Any]:
    job = prepare(TwoKinds, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), loss=lambda out, _: (out.sum(), 3.0))
    job.backward([torch.ones(2, 6), torch.zeros(2)])
    return [job.model.full.grad, job.model.brief.grad]


def test_the_divisor_is_not_rounded_to_the_dtype_of_a_parameter() -> None:
    ((full, brief),) = run_ranks(divided, 1)

    assert torch.equal(full, torch.full((3,), 2 / 3)) and brief.dtype == torch.bfloat16


def around_one_module(world: Any) -> list[int]:
    module = net()
    found = []
    for _ in range(3):
        job = prepare(module, Recording, loss=mean_loss)
        job.backward(next(iter(DataLoader(points(), batch_size=8))))
        del job
        gc.collect()
        found.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()))
    return found


def test_a_deleted_job_leaves_no_hooks_on_the_users_module() -> None:
    assert run_ranks(around_one_module, 2) == [[0, 0, 0]] * 2


def with_a_group_of_ones_own(world: Any) -> tuple[str, int, int]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job = prepare(module, optimizer, loss=mean_loss)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(TrainingError, match="parameters were added after the job was built"):
        job.switch("zero1")
    return str(job.strategy), len(job.switches), len(job.optimizer.param_groups)


def test_a_group_added_to_the_given_optimizer_makes_a_switch_fail_cleanly() -> None:
    assert run_ranks(with_a_group_of_ones_own, 2) == [("dp=2", 0, 2)] * 2


def scheduled(world: Any, when: str) -> list[float]:
    """Return the learning rates, and the difference of the weights from the same loop in plain torch."""
    found = []
    for plain in (True, False):
        torch.manual_seed(SEED)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if when == "before":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        job = None if plain else prepare(model, optimizer, loss=mean_loss, log_dir=None)
        if when == "after":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        loader = DataLoader(points(), batch_size=8)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module="torch.optim")  # it warns if it saw no step
            for batch in loader if job is None else job.batches(loader):
                if job is None:
                    mean_loss(model(batch[0]), batch[1]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    job.backward(batch)
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                schedule.step()
                if job is not None and job.step == 2:
                    job.switch("zero1")
        found.append(model.state_dict() if job is None else job.full_state_dict())
    assert job is not None
    far = max(float((found[0][name] - value).abs().max()) for name, value in found[1].items())
    return [job.optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr"], far]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_on_the_given_optimizer_changes_the_rate(when: str) -> None:
    for inner, given, far in run_ranks(scheduled, 2, when):
        assert inner == given == pytest.approx(0.025) and far < 1e-6


def states_loaded(world: Any) -> list[str]:
    """Return how each strategy accepts a state of whole parameters, ddp one of parts, and each its own state."""
    said, kept = [], {}
    for strategy in ("ddp", "zero1", "tp", "pp", "ddp"):
        example = default_collate(points(8))
        given: dict[str, Any] = {
            "loss": mean_loss,
            "strategy": strategy,
            "log_dir": None,
            "hints": nbkit.ModelHints(example=example),
        }
        job = prepare(net, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), **given)
        job.backward(example)
        job.optimizer.step()
        own = job.optimizer.state_dict()
        for other in (kept.get("zero1" if strategy == "ddp" else "ddp"), own):
            try:
                if other is not None:
                    job.optimizer.load_state_dict(copy.deepcopy(other))
                    said.append(f"{strategy} takes it")
            except TrainingError as error:
                said.append(f"{strategy} {error.numbers}")
        kept[strategy] = own
    return said


def test_an_optimizer_accepts_only_a_state_that_fits() -> None:
    first, _ = run_ranks(states_loaded, 2)

    assert first == [
        "ddp takes it",
        "zero1 exp_avg of parameter 0 is (16, 6), and this rank updates (8, 6)", "zero1 takes it",
        "tp exp_avg of parameter 0 is (16, 6), and this rank updates (8, 6)", "tp takes it",
        "pp it is of 4 parameters, and this rank updates 2", "pp takes it",
        "ddp exp_avg of parameter 0 is (8, 6), and this rank updates (16, 6)", "ddp takes it",
    ]  # fmt: skip


def evaluated(world: Any, strategy: str) -> tuple[float, float]:
    """Return the loss on other samples (between two steps, at the end)."""
    job = prepare(
        net,
        sgd,
        loss=mean_loss,
        strategy=strategy,
        seed=SEED,
        hints=nbkit.ModelHints(example=default_collate(points(8))),
    )
    found = []
    for batch in job.batches(DataLoader(points(), batch_size=8)):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
        found.append(job.evaluate(points(21), batch_size=8))
    return found[0], found[-1]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["pp", "zero3"])
def test_a_loop_can_evaluate_between_its_steps(strategy: str) -> None:
    torch.manual_seed(SEED)
    model = net()
    optimizer, losses = sgd(model), []
    for value, target in DataLoader(points(), batch_size=8):
        mean_loss(model(value), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        values, targets = (torch.stack(part) for part in zip(*points(21), strict=True))
        losses.append(mean_loss(model(values), targets).item())
    expected = losses[0], losses[-1]

    for found in run_ranks(evaluated, 2, strategy):
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected[1] < expected[0]
