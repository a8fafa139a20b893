"""What would train wrong in a loop that keeps its forward is refused by name, before it changes a weight."""

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

    def updating_alone() -> None:
        job.backward(loss_of(job))
        with torch.no_grad():
            next(job.model.parameters()).mul_(1.0)
        job.optimizer.zero_grad()

    def ignoring() -> None:
        x, y = job.rows(DATA[0])
        target = torch.arange(len(y)) % 2 * 100 - 100  # every other row counts
        job.backward(F.cross_entropy(job.model(x), target))

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
        "ignored targets": ignoring,
        "which rows": ambiguous,
    }.items():
        whole = ("no rows", "which rows", "an update by hand", "no step at all", "ignored targets")
        if name in whole and "tp" in strategy:
            continue  # ranks that share each row have all of them
        if name in ("an update by hand", "no step at all") and strategy == "zero3":
            continue  # the parameters of the model have no gradients there
        found[name] = said(act)
        job.optimizer.zero_grad()
    job.break_off()  # as a loop that is left by this error does
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
    "ignored targets": "weight=(target != -100).sum()",
    "an update by hand": "job.grad_norm() before the change",
    "no step at all": "job.grad_norm() before the change",
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
def test_misuse_is_refused_and_says_what_to_type(strategy: str) -> None:
    for rank in run_ranks(misused, 2, strategy):
        for name, text in rank.items():
            assert HINTS[name] in text, f"{name}: {text}"


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
def test_the_optimizer_that_was_given_cannot_step_but_its_scheduler_works(strategy: str) -> None:
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
def test_a_rank_that_skips_a_step_is_told() -> None:
    with pytest.raises(RankFailed, match=r"(?s)different calls.*the update of step 1"):
        run_ranks(skipping, 2)
