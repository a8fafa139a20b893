"""Test that wrong uses in a loop with its own forward are refused by name, before they change a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_programs import adam, batches, mlp
from ranks import RankFailed, run_ranks
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import NbkitError
from nbkit.rank.loss.mean_over_rows import compares_rows

DATA = batches(4, 8, 4, 3)
EXAMPLE = tuple(DATA[0])


def prepared(strategy: str, model: Callable[[], nn.Module] | None = None, **options: Any) -> Any:
    hints = nbkit.ModelHints(example=EXAMPLE)
    make = model or (lambda: mlp(4, 3, 1))
    return nbkit.prepare(make, adam, strategy=strategy, hints=hints, **{"log_dir": None, **options})


def said(act: Callable[[], Any]) -> str:
    with pytest.raises(NbkitError) as raised:
        act()
    return str(raised.value)


def loss_of(job: Any, batch: Any = DATA[0]) -> torch.Tensor:
    x, y = job.rows(batch)
    return F.mse_loss(job.model(x), y)


def misused(world: Any, strategy: str) -> dict[str, str]:
    job = prepared(strategy)
    weights = job.full_state_dict()
    found = {"before rows": said(lambda: job.backward(torch.ones((), requires_grad=True)))}

    def drawing() -> None:
        x, y = job.rows(DATA[0])
        job.backward(F.mse_loss(job.model(x + torch.randn_like(x)), y))

    def clipping() -> None:
        job.backward(loss_of(job))
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)

    def scaling() -> None:
        scaler = torch.amp.GradScaler("cpu")
        job.backward(scaler.scale(loss_of(job)))
        scaler.step(job.optimizer)

    def updating() -> None:
        job.backward(loss_of(job))
        with torch.no_grad():
            for p in job.model.parameters():
                p -= 0.0 * p.grad
        job.optimizer.step()

    def changing_gradients() -> None:
        job.backward(loss_of(job))
        for p in job.model.parameters():
            p.grad.clamp_(-1.0, 1.0)
        job.optimizer.step()

    def updating_alone() -> None:
        job.backward(loss_of(job))
        with torch.no_grad():
            next(job.model.parameters()).mul_(1.0)
        job.optimizer.zero_grad()

    def ambiguous() -> None:
        x, y = job.rows(DATA[0])
        job.rows([part[:7] for part in DATA[1]])
        job.backward(F.mse_loss(job.model(x), y))

    def summed() -> None:
        job.backward(loss_of(job))
        job.clip(1.0)
        job.backward(loss_of(job))

    def after_the_last() -> None:
        job.backward(loss_of(job), last=True)
        job.backward(loss_of(job))

    def mixed() -> None:
        job.backward(loss_of(job))
        job.backward(DATA[0])

    def switched() -> None:
        job.backward(loss_of(job))
        job.switch("zero2")

    def frozen() -> None:
        job.backward(loss_of(job))
        next(job.model.parameters()).requires_grad_(False)
        try:
            job.backward(loss_of(job))
        finally:
            next(job.model.parameters()).requires_grad_(True)

    for name, act in {
        "a draw": drawing,
        "torch's clip": clipping,
        "torch's scaler": scaling,
        "loss.backward()": lambda: loss_of(job).backward(),
        "no gradient": lambda: job.backward(loss_of(job).detach()),
        "reduction": lambda: job.backward(loss_of(job), weight=3, reduction="sum"),
        "after clip": summed,
        "after the last": after_the_last,
        "a batch beside": mixed,
        "a batch": lambda: job.backward(DATA[0]),
        "evaluate": lambda: job.evaluate(DATA, batch_size=2),
        "a switch": switched,
        "frozen": frozen,
        "no rows": lambda: job.rows([part[:1] for part in DATA[0]]),
        "the loss too early": lambda: float(job.backward(loss_of(job)).loss),
        "no random function": lambda: job.draw(torch.zeros_like, job.rows(DATA[0])[0]),
        "a draw of no rows": lambda: job.draw(torch.randn, 3),
        "an update by hand": updating,
        "no step at all": updating_alone,
        "gradients by hand": changing_gradients,
        "which rows": ambiguous,
    }.items():
        whole = ("no rows", "which rows", "an update by hand", "no step at all")
        if name in whole and "tp" in strategy:
            continue  # ranks that share each row have all of them
        if name in ("an update by hand", "no step at all", "gradients by hand") and strategy == "zero3":
            continue  # under this strategy, the parameters of the model have no gradients
        found[name] = said(act)
        job.optimizer.zero_grad()
    job.break_off()  # as when this error ends a loop
    if strategy != "ddp":
        found["a penalty"] = said(
            lambda: job.backward(loss_of(job) + sum(p.square().sum() for p in job.model.parameters()))
        )
        job.optimizer.zero_grad()
        part = {"zero3": lambda x: job.model[2](job.model[1](job.model[0](x)))}.get(strategy)
        if part is not None:
            found["a part"] = said(lambda: job.backward(part(job.rows(DATA[0])[0]).square().mean()))
            job.optimizer.zero_grad()
    job.backward(loss_of(job))
    if strategy == "zero3":
        loss_of(job)
        loss_of(job)  # two forwards keep the parameters gathered
        found["a look within a step"] = said(job.full_state_dict)
    job.optimizer.zero_grad()
    assert all(torch.equal(weights[name], value) for name, value in job.full_state_dict().items())
    job.backward(loss_of(job))
    job.optimizer.step()
    return found


HINTS = {
    "before rows": "job.rows(batch)",
    "a draw": "job.draw(torch.randn_like, x)",
    "torch's clip": "job.clip(1.0)",
    "torch's scaler": "precision='fp16'",
    "loss.backward()": "job.backward(loss)",
    "no gradient": ".detach()",
    "reduction": "reduction='sum'",
    "which rows": "weight=len(x)",
    "an update by hand": "job.grad_norm() before the change",
    "no step at all": "job.grad_norm() before the change",
    "gradients by hand": "job.clip(1.0) to clip",
    "after clip": "job.clip",
    "after the last": "last=True",
    "a batch beside": "job.optimizer.step() between them",
    "a batch": "loss=loss",
    "evaluate": "loss=loss",
    "a switch": "switch after job.optimizer.step()",
    "frozen": "before the first job.backward(loss)",
    "no rows": "drop_last=True",
    "the loss too early": "result.loss",
    "no random function": "job.draw(torch.randn_like, x)",
    "a draw of no rows": "draw for the whole batch",
    "a penalty": "job.model(...)",
    "a part": "job.model(...)",
    "a look within a step": "after job.optimizer.step()",
}


@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "dp=1 tp=2"])
def test_misuse_is_refused_with_what_to_type(strategy: str) -> None:
    for rank in run_ranks(misused, 2, strategy):
        for name, text in rank.items():
            assert HINTS[name] in text, f"{name}: {text}"


def edited(world: Any, strategy: str) -> list[tuple[str, int]]:
    def reading(job: Any) -> None:
        if world.place.rank == 0:
            job.model.load_state_dict(mlp(4, 3, 2).state_dict())

    def clamping(job: Any) -> None:
        for p in job.optimizer.param_groups[0]["params"]:
            p.data.clamp_(-0.1, 0.1)

    def swapping(job: Any) -> None:
        """Change the weights on rank 0, as for an evaluation of their average, and restore them."""
        if world.place.rank == 0:
            before = {name: value.clone() for name, value in job.model.state_dict().items()}
            reading(job)
            job.model.load_state_dict(before)

    found = []
    for when, edit in ((0, reading), (5, reading), (1, clamping), (5, swapping)):
        job = prepared(strategy)

        def steps(job: Any = job, when: int = when, edit: Any = edit) -> None:
            for number in range(8):
                if number == when:
                    edit(job)
                job.backward(loss_of(job, DATA[number % 4]))
                job.optimizer.step()
                job.optimizer.zero_grad()
            raise NbkitError("no error")

        found.append((said(steps), job.step))
    return found


@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_weights_that_ranks_change_in_different_ways_end_the_training(strategy: str) -> None:
    first, second = run_ranks(edited, 2, strategy)
    assert first == second
    at_start, later, (clamped, steps), swapped = first
    assert at_start[1] == 0 and "different weights in step 1" in at_start[0]
    if strategy == "ddp":  # all ranks compare in the step after the change
        assert later[1] == 6 and "different weights in step 7" in later[0] and swapped == ("no error", 8)
        # Each rank has all weights in the groups of the optimizer.
        assert clamped == "no error" and steps == 8
    else:
        assert later[1] == swapped[1] == 5 and "unchanged" in later[0] and "unchanged" in swapped[0]
        assert steps == 1 and "job.model.parameters()" in clamped


COUNTS = {
    "a row of rank 0": [1, -100, 1, 1, 2, 0, 1, 2],
    "all rows of rank 1": [0, 1, 2, 1, -100, -100, -100, -100],
    "one row for each rank": [1, -100],
}


def ignoring(world: Any, strategy: str) -> list[tuple[str, bool]]:
    found = []
    for targets in COUNTS.values():
        job = prepared(strategy)
        weights = job.full_state_dict()

        def step(targets: list[int] = targets, job: Any = job) -> None:
            x, target = job.rows([DATA[0][0][: len(targets)], torch.tensor(targets)])
            job.backward(F.cross_entropy(job.model(x), target))
            job.optimizer.step()

        words = said(step)
        found.append((words, all(torch.equal(weights[name], now) for name, now in job.full_state_dict().items())))
    return found


@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_ignored_targets_in_the_rows_of_one_rank_are_refused_on_all(strategy: str) -> None:
    first, second = run_ranks(ignoring, 2, strategy)
    assert first == second
    numbers = ["0.75, 1 targets", "1, 0 targets", "1, 0 targets"]
    for (words, unchanged), shown in zip(first, numbers, strict=True):
        assert unchanged and shown in words and "weight=(target != -100).sum()" in words
    assert "the rows of rank 0 have" in first[0][0]


def by_row(world: Any) -> list[int]:
    found = []
    for rows in (8, 4):
        job = prepared("ddp")
        batch = [DATA[0][0][:rows, None].repeat(1, 5, 1), torch.tensor([1, 4, 2, 5, 3, 1, 1, 2][:rows])]
        x, lengths = job.rows(batch)
        each = [F.cross_entropy(out[:n], torch.arange(5)[:n] % 3) for out, n in zip(job.model(x), lengths, strict=True)]
        job.backward(torch.stack(each).mean())
        job.optimizer.step()
        found.append(job.step)
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_a_mean_of_one_cross_entropy_for_each_row_is_a_mean_over_rows() -> None:
    assert run_ranks(by_row, 2) == [[1, 1]] * 2


def two_heads(world: Any) -> str:
    job = prepared("ddp")

    def step() -> None:
        x, target = job.rows([DATA[0][0][:4], torch.tensor([1, -100, 1, 2])])
        out = job.model(x)
        job.backward(F.cross_entropy(out, target) + F.cross_entropy(out.square(), target))
        job.optimizer.step()

    return said(step)


@pytest.mark.usefixtures("rows_are_known")
def test_two_cross_entropies_of_two_rows_are_not_taken_for_one_for_each_row() -> None:
    for words in run_ranks(two_heads, 2):
        assert "the rows of rank 0 have different numbers" in words and "for a mean over rows, weight=len(x)" in words


def at_no_rate(world: Any) -> list[tuple[str, int]]:
    found = []
    for rate, ranks in (("nan", (0, 1)), ("inf", (1,))):
        job = prepared("ddp")
        if world.place.rank in ranks:
            job.optimizer.param_groups[0]["lr"] = float(rate)

        def step(job: Any = job) -> None:
            job.backward(loss_of(job))
            job.optimizer.step()

        found.append((said(step), job.step))
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_a_learning_rate_that_is_not_finite_is_refused_by_name() -> None:
    first, second = run_ranks(at_no_rate, 2)
    assert first == second
    for (words, steps), ranks in zip(first, ("ranks 0, 1", "rank 1"), strict=True):
        assert "The learning rate of step 1 is not finite." in words and f"on {ranks}" in words and steps == 0


def editing_on_rank_0(world: Any) -> list[tuple[str, int]]:
    found = []
    for losses in (1, 2):
        job = prepared("ddp")

        def steps(job: Any = job, losses: int = losses) -> None:
            for number in range(6):
                for _ in range(losses):
                    job.backward(loss_of(job))
                    if number == 5 and world.place.rank == 0:
                        next(job.model.parameters()).grad.mul_(0.5)
                job.optimizer.step()
                job.optimizer.zero_grad()

        found.append((said(steps), job.step))
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_gradients_that_one_rank_has_changed_are_refused_on_all() -> None:
    first, second = run_ranks(editing_on_rank_0, 2)
    assert first == second
    for words, steps in first:
        assert "Gradients were changed" in words and "on rank 0" in words and steps == 5


def comparing(world: Any, strategies: list[str]) -> list[tuple[str, int]]:
    found = []
    for strategy in strategies:
        job = prepared(strategy)

        def steps(job: Any = job) -> None:
            x, y = job.rows([part[:3] for part in DATA[0]])  # rank 1 has one row, and cannot tell
            loss = F.mse_loss(job.model(x), y).sqrt()
            job.backward(loss, **({"weight": len(x)} if found else {}))
            job.optimizer.step()
            raise NbkitError("no error")

        found.append((said(steps), job.step))
    return found


@pytest.mark.usefixtures("rows_are_known")
def test_a_loss_that_compares_rows_is_refused_on_all_ranks_unless_it_has_a_weight() -> None:
    first, second = run_ranks(comparing, 2, ["ddp", "ddp"])
    assert first == second
    (words, steps), weighed = first
    assert "in the rows of rank 0" in words and "strategy='tp'" in words and steps == 0
    assert weighed == ("no error", 1)


def stepped(world: Any, strategy: str) -> tuple[str, list[float]]:
    model = mlp(4, 3, 1)
    given = adam(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    job = nbkit.prepare(model, given, strategy=strategy, hints=nbkit.ModelHints(example=EXAMPLE), log_dir=None)
    rates = []
    for batch in job.batches(DATA[:3]):
        if not rates:
            job.backward(loss_of(job, batch))
            told = said(given.step)
            job.optimizer.zero_grad()
        job.backward(loss_of(job, batch))
        job.optimizer.step()
        schedule.step()
        job.optimizer.zero_grad()
        rates.append(job.optimizer.param_groups[0]["lr"])
    return told, rates


@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_the_given_optimizer_cannot_step_but_its_scheduler_works(strategy: str) -> None:
    for told, rates in run_ranks(stepped, 2, strategy):
        assert "optimizer = job.optimizer" in told
        assert [rates[0] / rate for rate in rates] == pytest.approx([1, 2, 4])


def skipping(world: Any) -> str:
    job = prepared("ddp")
    for batch in job.batches(DATA):
        if world.place.rank == 0:
            job.backward(loss_of(job, batch))
            job.optimizer.step()
    return ""


@pytest.mark.usefixtures("rows_are_known")
def test_a_rank_that_skips_a_step_is_an_error() -> None:
    with pytest.raises(RankFailed, match=r"(?s)different calls.*the update of step 1"):
        run_ranks(skipping, 2)


ROWS = 6
LOSSES: dict[str, tuple[bool, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "mean": (False, lambda a, b: F.mse_loss(a, b.detach()), (ROWS, 5)),
    "targets": (False, lambda a, b: F.cross_entropy(a, torch.arange(ROWS), label_smoothing=0.1), (ROWS, ROWS)),
    "within a row": (False, lambda a, b: F.cosine_similarity(a, b).mean() + a.norm(dim=1).mean(), (ROWS, 5)),
    "steps of time, then rows": (False, lambda a, b: (a[1:] - a[:-1]).square().mean(), (ROWS, ROWS, 2)),
    "normalised, detached": (False, lambda a, b: ((a - a.mean(0).detach()) ** 2).mean(), (ROWS, 5)),
    "root": (True, lambda a, b: F.mse_loss(a, b.detach()).sqrt(), (ROWS, 5)),
    "contrastive": (True, lambda a, b: F.cross_entropy(a @ b.T, torch.arange(ROWS)), (ROWS, 5)),
    "a ratio of sums": (True, lambda a, b: (a.sigmoid() * b.detach()).sum() / a.sigmoid().sum(), (ROWS, 5)),
    "the next row": (True, lambda a, b: (a - a.roll(1, 0)).square().mean(), (ROWS, 5)),
    "variance": (True, lambda a, b: F.relu(1 - a.std(0)).mean(), (ROWS, 5)),
    "flattened": (False, lambda a, b: F.cross_entropy(a, torch.arange(2 * ROWS) % ROWS), (2 * ROWS, ROWS)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_that_compares_rows_is_told_by_its_second_derivative(name: str, dtype: torch.dtype) -> None:
    compares, loss_of_two, shape = LOSSES[name]
    torch.manual_seed(0)
    layer = nn.Linear(4, torch.Size(shape[1:]).numel()).to(dtype)
    a, b = (layer(torch.randn(shape[0], 4, dtype=dtype)).reshape(shape) for _ in range(2))
    shapes = {tensor.grad_fn: shape for tensor in (a, b)}
    loss = loss_of_two(a, b)
    assert compares_rows(loss, lambda node, _: shapes.get(node), ROWS) == compares
    loss.backward()  # the graph is kept
    assert layer.weight.grad is not None
