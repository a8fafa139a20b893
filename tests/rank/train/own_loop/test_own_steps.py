"""Test draws, records, checkpoints, precision and several jobs in a loop with its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_programs import adam, batches, mlp
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import NbkitError, NotFinite, StrategyError
from nbkit.rank.train.own_loop.forward_step import in_two
from verify.models.specimens import ZOO, next_tokens

DATA = batches(8, 8, 4, 3)
EXAMPLE = tuple(DATA[0])


def prepared(strategy: str, model: Callable[[], nn.Module] | None = None, **options: Any) -> Any:
    hints = nbkit.ModelHints(example=EXAMPLE)
    make = model or (lambda: mlp(4, 3, 1))
    return nbkit.prepare(make, adam, strategy=strategy, hints=hints, **{"log_dir": None, **options})


def step(job: Any, loss: Tensor, **options: Any) -> None:
    job.backward(loss, **options)
    job.optimizer.step()
    job.optimizer.zero_grad()


def dropping() -> nn.Module:
    net = mlp(4, 3, 1)
    return nn.Sequential(net[0], nn.Tanh(), nn.Dropout(0.3), net[2])


def with_draws(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        job = prepared(strategy, dropping)
        for x, y in map(job.rows, job.batches(DATA[:4])):
            noise = job.draw(torch.randn_like, x)
            scale = job.draw(torch.rand, len(x), 1, dtype=x.dtype)
            step(job, F.mse_loss(job.model(x + scale * noise), y) + job.model(x - noise).square().mean())
        found.append([[record["loss"] for record in job.history], job.full_state_dict()["0.bias"]])
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_draws_by_row_and_dropout_are_the_same_under_every_strategy_and_world() -> None:
    ((alone,),) = run_ranks(with_draws, 1, ["ddp"])
    assert len(set(alone[0])) == 4
    for rank in run_ranks(with_draws, 2, ["ddp", "zero3", "dp=1 tp=2"]):
        for losses, bias in rank:
            assert losses == pytest.approx(alone[0], rel=1e-9)
            torch.testing.assert_close(bias, alone[1], rtol=1e-9, atol=1e-11)


def accumulating(job: Any, data: list[Any]) -> None:
    """Make each step of two batches. A step boundary comes only after the second."""
    for number, batch in enumerate(job.batches(data)):
        x, y = job.rows(batch)
        job.backward(F.mse_loss(job.model(x), y) / 2)
        job.log(seen=number)
        if number % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()


def resumed(world: Any, path: str) -> list[Any]:
    job = prepared("ddp", switches={1: "zero3", 3: "tp=2"})
    accumulating(job, DATA[:4])
    job.save(path)
    accumulating(job, DATA[4:])
    again = prepared("zero2")
    again.load(again.opened(path))
    accumulating(again, DATA[4:])
    kept = ("step", "loss", "seen", "strategy")
    return [[[record[key] for key in kept] for record in one.history] for one in (job, again)] + [
        one.full_state_dict() for one in (job, again)
    ]


@pytest.mark.usefixtures("rows_are_known")
def test_a_loop_with_accumulation_can_be_switched_and_resumed(tmp_path: Any) -> None:
    model = mlp(4, 3, 1)
    optimizer, losses = adam(model), []
    for number in range(0, 8, 2):
        loss = sum(F.mse_loss(model(x), y) / 2 for x, y in DATA[number : number + 2])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for history, later, state, again in run_ranks(resumed, 2, str(tmp_path / "saved")):
        assert [record[1] for record in history] == pytest.approx(losses, rel=1e-9)
        assert [record[1] for record in later] == pytest.approx(losses, rel=1e-9)
        assert [record[0] for record in history] == [1, 2, 3, 4]
        assert [record[2] for record in history] == [1, 3, 1, 3]
        assert [record[3] for record in history] == ["dp=2", "dp=2 zero=3", "dp=2 zero=3", "tp=2"]
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(again[key], value, rtol=1e-9, atol=1e-11)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def uneven(world: Any, strategy: str, model: Any, how: str) -> str:
    job = prepared(strategy, model)
    first = world.place.rank == 0
    try:
        for x, y in map(job.rows, job.batches(DATA)):
            if first and how == "a forward":
                job.model(x)
            if first and how == "a look":
                with torch.no_grad():
                    job.model(x)
            loss = F.mse_loss(job.model(x), y)
            if first and how == "a loss":
                job.backward(loss, retain_graph=True)
            if first and how == "a mean":
                job.mean(loss)
            step(job, loss, **({"weight": 4.0} if first and how == "a weight" else {}))
    except NbkitError as error:
        return f"{error} after {job.step}"
    return ""


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize(
    ("strategy", "model", "how", "words"),
    [
        ("zero3", None, "a forward", "job.model, call 2 of step 1"),
        ("zero3", None, "a loss", "job.backward, loss 1 of step 1, retain_graph=True"),
        ("dp=1 tp=2", None, "a look", "job.model, call 1 of step 1, without gradients"),
        ("ddp", Normed, "a forward", "job.model, call 2 of step 1"),
        ("ddp", None, "a loss", "a different number of times"),
        ("ddp", None, "a mean", "job.mean"),
        ("ddp", None, "a weight", "with a weight"),
    ],
)
def test_a_rank_that_makes_more_calls_is_named_before_a_weight_changes(
    strategy: str, model: Any, how: str, words: str
) -> None:
    for said in run_ranks(uneven, 2, strategy, model, how):
        assert words in said and said.endswith("after 0"), said


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x - x.mean(0))
        return found


def without_an_example(world: Any, strategy: str) -> list[Any]:
    found: list[Any] = []
    for model in (lambda: mlp(4, 3, 1), dropping, Coupled):
        job = nbkit.prepare(model, adam, strategy=strategy, log_dir=None)
        try:
            for x, y in map(job.rows, DATA[:6]):
                out = job.model(x)
                step(job, F.mse_loss(out, y) + job.model(2 * x).square().mean())
            found.append([record["loss"] for record in job.history])
        except NbkitError as error:
            found.append(f"{error} after {job.step}")
    return found


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_coupled_rows_are_found_in_the_first_calls_without_an_example(strategy: str) -> None:
    model = mlp(4, 3, 1)
    optimizer, losses = adam(model), []
    for x, y in DATA[:6]:
        loss = F.mse_loss(model(x), y) + model(2 * x).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ((_, alone, _),) = run_ranks(without_an_example, 1, strategy)
    for plain, drops, coupled in run_ranks(without_an_example, 2, strategy):
        assert plain == pytest.approx(losses, rel=1e-9) and drops == pytest.approx(alone, rel=1e-9)
        assert "mixes the rows" in coupled and coupled.endswith("after 0"), coupled


class Output(dict[str, Tensor]):
    """A class that torch does not know as a tree."""


class WithLoss(nn.Module):
    """Returns its loss with its output, as models of transformers do. Some targets are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.net(x)
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)


LABELS = [(x, y.argmax(1).masked_fill(y[:, 0] > 0, -100)) for x, y in DATA]


def with_a_loss(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        job = nbkit.prepare(WithLoss, adam, strategy=strategy, log_dir=None)
        for x, labels in map(job.rows, LABELS[:4]):
            step(job, job.model(x=x, labels=labels)["loss"], weight=(labels != -100).sum())
        found.append(job.full_state_dict())
    return found


def test_a_model_may_return_its_loss() -> None:
    model = WithLoss()
    optimizer = adam(model)
    for x, labels in LABELS[:4]:
        model(x, labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in run_ranks(with_a_loss, 2, ["ddp", "zero3", "dp=1 tp=2"]):
        for state in rank:
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)


def normed(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        job = prepared(strategy, lambda: torch.manual_seed(2) and Normed())
        for x, y in map(job.rows, DATA[:4]):
            step(job, F.mse_loss(job.model(x), y) + job.model(x * x).square().mean())
        found.append(job.full_state_dict())
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_batch_norm_in_several_forwards_of_a_step_equals_one_process() -> None:
    torch.manual_seed(2)
    model = Normed()
    optimizer = adam(model)
    for x, y in DATA[:4]:
        (F.mse_loss(model(x), y) + model(x * x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in run_ranks(normed, 2, ["ddp", "zero3"]):
        for state in rank:
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-8)


def two_networks(loader: Any, prepare: Any) -> list[Any]:
    body, head = mlp(4, 5, 1), mlp(5, 3, 2)
    jobs = [prepare(body, EXAMPLE), prepare(head, (torch.randn(4, 5, dtype=torch.float64), EXAMPLE[1]))]
    for x, y in loader(jobs):
        loss = F.mse_loss(head(body(x)), y)
        jobs[1].backward(loss)
        for job in jobs:
            job.optimizer.step()
            job.optimizer.zero_grad()
    return jobs


def one_loss_for_two(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:

        def prepare(model: nn.Module, example: Any, strategy: str = strategy) -> Any:
            hints = nbkit.ModelHints(example=example)
            return nbkit.prepare(model, adam(model), strategy=strategy, hints=hints, log_dir=None)

        jobs = two_networks(lambda jobs: map(jobs[1].rows, jobs[1].batches(DATA, others=jobs[:1])), prepare)
        found.append([job.full_state_dict() for job in jobs] + [[r["loss"] for r in job.history] for job in jobs])
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_one_loss_trains_two_jobs_and_is_in_the_records_of_both() -> None:
    class Job:
        def __init__(self, model: nn.Module, _: Any) -> None:
            self.model, self.optimizer, self.losses = model, adam(model), list[float]()

        def backward(self, loss: Tensor) -> None:
            self.losses.append(loss.item())
            loss.backward()

    plain = two_networks(lambda _: DATA, Job)
    for rank in run_ranks(one_loss_for_two, 2, ["ddp", "zero2", "zero3", "dp=1 tp=2"]):
        for *states, of_body, of_head in rank:
            assert of_body == of_head == pytest.approx(plain[1].losses, rel=1e-9)
            for job, state in zip(plain, states, strict=True):
                for key, value in job.model.state_dict().items():
                    torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)


def sharpness_aware(data: Any, rows: Any, model: Any, backward: Any, norm: Any, optimizer: Any) -> None:
    """Train by SAM: each step uses the gradient at weights that were moved along the gradient."""
    for x, y in map(rows, data):
        backward(F.mse_loss(model(x), y))
        length = norm()
        with torch.no_grad():
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            moved = [p.grad * 0.5 / length for p in params]
            for p, move in zip(params, moved, strict=True):
                p.add_(move)
            optimizer.zero_grad()
        backward(F.mse_loss(model(x), y))
        norm()
        with torch.no_grad():
            for p, move in zip(params, moved, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def moved(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        job = prepared(strategy)
        sharpness_aware(job.batches(DATA[:3]), job.rows, job.model, job.backward, job.grad_norm, job.optimizer)
        found.append(job.full_state_dict())
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_weights_that_were_moved_by_summed_gradients_are_those_of_the_next_forward_on_all_ranks() -> None:
    model = mlp(4, 3, 1)

    def norm() -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    sharpness_aware(DATA[:3], tuple, model, lambda loss: loss.backward(), norm, adam(model))
    for rank in run_ranks(moved, 2, ["ddp", "zero1", "zero2", "zero3", "dp=1 tp=2"]):
        for state in rank:
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)


def sharing_fails(world: Any) -> list[bool]:
    job = prepared("zero1")
    x, y = job.rows(DATA[0])
    job.backward(F.mse_loss(job.model(x), y))
    job.grad_norm()
    job.optimizer.zero_grad()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="a rank died"):
        patch.setattr(job.sharded_model, "after_step", lambda: (_ for _ in ()).throw(RuntimeError("a rank died")))
        job.rows(DATA[0])
    return [job.integrity.broken_off]


@pytest.mark.usefixtures("rows_are_known")
def test_an_error_while_moved_weights_are_shared_interrupts_the_step() -> None:
    assert run_ranks(sharing_fails, 2) == [[True]] * 2


def apart(world: Any) -> str:
    one, other = prepared("ddp"), prepared("dp=1 tp=2", lambda: mlp(3, 1, 2))
    x, _ = one.rows(DATA[0])
    with pytest.raises(NbkitError) as raised:
        other.model(one.model(x))
    return str(raised.value)


@pytest.mark.usefixtures("rows_are_known")
def test_jobs_that_divide_a_batch_differently_cannot_share_rows() -> None:
    for said in run_ranks(apart, 2):
        assert "1 parts; the rows are one of 2" in said and "others=[other]" in said


def not_finite(world: Any, strategy: str) -> list[Any]:
    job = prepared(strategy)
    before = job.full_state_dict()
    x, y = job.rows(DATA[0])
    job.backward(F.mse_loss(job.model(x), y) * (float("nan") if world.place.rank else 1.0))
    with pytest.raises(NotFinite):
        job.optimizer.step()
    same = all(torch.equal(value, before[key]) for key, value in job.full_state_dict().items())
    x, y = job.rows(DATA[1])
    step(job, F.mse_loss(job.model(x), y))
    return [same, job.step, len(job.history)]


@pytest.mark.usefixtures("rows_are_known")
def test_a_loss_that_is_not_finite_changes_no_weight_and_the_next_batch_trains() -> None:
    assert run_ranks(not_finite, 2, "ddp") == [[True, 1, 1]] * 2


def in_precision(world: Any, precision: str | None, strategy: str) -> list[Any]:
    found = []
    for how in ((True, True), (False, False), (True, False)):
        job = prepared(strategy, lambda: mlp(4, 3, 1).float(), loss=F.mse_loss, precision=precision)
        for batch, own in zip(DATA[:4], 2 * how, strict=True):
            x, y = rows = [part.float() for part in batch]
            if own:
                x, y = job.rows(rows)
                with torch.autocast("cpu", job.precision.dtype, enabled=precision is not None):
                    job.backward(F.mse_loss(job.model(x), y))
            else:
                job.backward((x, y))
            job.clip(1.0)
            job.optimizer.step()
            job.optimizer.zero_grad()
        found.append([[r["loss"] for r in job.history], [r.get("loss_scale") for r in job.history]])
        found[-1].append(job.full_state_dict()["0.weight"])
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("precision", "strategy"),
    [("fp16", "ddp"), ("bf16", "zero3"), ("fp16", "zero2"), (None, "sync_every=2"), (None, "compress=bf16")],
)
def test_precisions_and_strategy_keys_train_as_with_backward_of_a_batch(precision: str | None, strategy: str) -> None:
    for own, batch, by_turns in run_ranks(in_precision, 2, precision, strategy):
        for other in (own, by_turns):
            assert other[0] == pytest.approx(batch[0], rel=1e-6) and other[1] == batch[1]
            torch.testing.assert_close(other[2], batch[2], rtol=1e-5, atol=1e-7)


def of_tokens(job: Any, data: list[Any]) -> None:
    for ids, target in data:
        ids, target = job.rows([ids, target])
        kept = target % 5 != 0
        each = F.cross_entropy(job.model(ids).flatten(0, 1), target.flatten(), reduction="none")
        job.backward((each * kept.flatten()).sum() / kept.sum(), weight=kept.sum())
        job.clip(0.5)
        job.optimizer.step()
        job.optimizer.zero_grad()


def tokens() -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [next_tokens(6, draw) for _ in range(3)]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return ZOO["gpt"].make().double()


def with_tokens(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        hints = nbkit.ModelHints(example=tokens()[0])
        job = nbkit.prepare(gpt, adam, strategy=strategy, hints=hints, log_dir=None)
        of_tokens(job, tokens())
        try:
            found.append([job.full_state_dict(), [record["loss"] for record in job.history]])
            job.switch("dp=1 pp=2 microbatches=2" if world.place.world_size == 2 else "pp=4 microbatches=4")
        except StrategyError as error:
            found[-1].append(str(error))
    return found


@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, ["dp=1 cp=2", "zero3"]),
        pytest.param(4, ["dp=2 cp=2", "tp=2 cp=2", "zero=3 dp=2 cp=2", "dp=2 tp=2"], marks=pytest.mark.long),
    ],
)
def test_a_transformer_with_split_positions_trains_as_one_process_and_pp_is_refused(
    ranks: int, strategies: list[str]
) -> None:
    model = gpt()
    optimizer = adam(model)
    for ids, target in tokens():
        kept = target % 5 != 0
        each = F.cross_entropy(model(ids).flatten(0, 1), target.flatten(), reduction="none")
        ((each * kept.flatten()).sum() / kept.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for rank in run_ranks(with_tokens, ranks, strategies, timeout=150):
        for strategy, (state, _, said) in zip(strategies, rank, strict=True):
            assert "a rank cannot run the forward pass alone" in said and "job.backward(batch)" in said
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-10, msg=f"{strategy} {key}")


def by_forward_step(world: Any, strategies: list[str]) -> list[Any]:
    """Return losses and weights of a loop whose forward and loss are one function, as a pipeline needs."""
    target = mlp(4, 3, 9).requires_grad_(False)

    def forward_step(model: Any, batch: Any) -> Tensor:
        x, y, noise = batch
        return F.mse_loss(model(torch.cat([x, noise], 1)), 0.5 * y + 0.5 * target(x))

    draw = torch.Generator().manual_seed(3)
    data = [[x, y, torch.randn(len(x), 2, generator=draw, dtype=x.dtype)] for x, y in DATA[:4]]
    found = []
    for strategy in strategies:
        hints, switches = nbkit.ModelHints(example=tuple(data[0])), {2: "dp=2"} if "pp" in strategy else None
        options: Any = {"strategy": strategy, "log_dir": None, "hints": hints, "switches": switches}
        job = nbkit.prepare(lambda: mlp(6, 3, 1), adam, forward_step=forward_step, **options)
        for batch in job.batches(data):
            job.backward(batch)
            job.optimizer.step()
            job.optimizer.zero_grad()
        found.append([[record["loss"] for record in job.history], job.full_state_dict()["0.weight"]])
    return found


def test_a_forward_step_trains_as_in_one_process_under_a_pipeline_too() -> None:
    model, losses = mlp(6, 3, 1), list[float]()
    optimizer, draw, target = adam(model), torch.Generator().manual_seed(3), mlp(4, 3, 9)
    for x, y in DATA[:4]:
        noise = torch.randn(len(x), 2, generator=draw, dtype=x.dtype)
        loss = F.mse_loss(model(torch.cat([x, noise], 1)), 0.5 * y + 0.5 * target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    for rank in run_ranks(by_forward_step, 2, ["pp=2"]):
        for found, weight in rank:
            assert found == pytest.approx(losses, rel=1e-9)
            torch.testing.assert_close(weight, model.state_dict()["0.weight"], rtol=1e-9, atol=1e-11)


def test_a_forward_step_that_no_pipeline_can_run_is_refused() -> None:
    batch = [torch.ones(2, 3), torch.ones(2, 1)]

    def said(forward_step: Any, *, loss: bool) -> str:
        arguments, loss_of = in_two(forward_step)
        with pytest.raises(NbkitError) as refused:
            loss_of(torch.ones(2, 1), batch) if loss else arguments(batch)
        return str(refused.value)

    assert "calls the model a second time" in said(lambda model, batch: model(batch[0]) + model(batch[1]), loss=True)
    assert "without a call of the model" in said(lambda model, batch: batch[0].sum(), loss=False)
    assert "draws random numbers" in said(lambda model, batch: model(torch.rand(2)), loss=False)
    assert "some by name" in said(lambda model, batch: model(batch[0], mask=batch[1]), loss=False)
    with pytest.raises(NbkitError, match="so loss= and inputs= are not allowed"):
        nbkit.prepare(lambda: mlp(4, 3, 1), adam, loss=F.mse_loss, forward_step=lambda model, batch: model(batch))
