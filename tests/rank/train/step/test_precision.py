"""Test that float16 with loss scaling equals one process with torch's GradScaler, under every family."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.device import Accelerator
from nbkit.rank.train.step.precision import Precision
from nbkit.rank.train.trainer import Trainer
from verify.models.specimens import ZOO, gpt, next_tokens

pytestmark = pytest.mark.usefixtures("known_to_be_right")

ROWS, STEPS, GROWS_AFTER = 4, 7, 2
NAMES = ("loss", "loss_scale", "grad_norm", "skipped")
BLOWN = (1, 5)  # steps whose gradients overflow float16 because of one row of one rank
STRATEGIES = {2: ("zero2", "tp"), 4: ("zero3", "dp=2 pp=2 microbatches=2")}


def model() -> nn.Module:
    made = gpt(2)
    made.load_state_dict({k: v for k, v in ZOO["gpt"].build().state_dict().items() if k in made.state_dict()})
    return made


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def items() -> list[tuple[Tensor, Tensor]]:
    """Return rows. The last number of a target multiplies its row's loss."""
    ids, target = next_tokens(ROWS * STEPS, torch.Generator().manual_seed(2))
    factor = torch.ones(ROWS * STEPS, 1, dtype=torch.long)
    factor[[ROWS * step + ROWS - 1 for step in BLOWN]] = 10**7
    return list(zip(ids, torch.cat([target, factor], 1), strict=True))


def loss(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.flatten(0, 1), target[:, :-1].flatten(), reduction="none")
    return (each.view(len(target), -1).mean(1) * target[:, -1]).mean()


def one_process() -> dict[str, list[float]]:
    made = model()
    update, scaler = optimizer(made), torch.amp.GradScaler("cpu", growth_interval=GROWS_AFTER)
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    rows = items()
    for step in range(STEPS):
        ids, target = (torch.stack(part) for part in zip(*rows[ROWS * step : ROWS * (step + 1)], strict=True))
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(made(ids), target)
        found["loss_scale"].append(scaler.get_scale())
        scaler.scale(value).backward()
        scaler.unscale_(update)
        found["grad_norm"].append(nn.utils.clip_grad_norm_(made.parameters(), 0.5).item())
        before = made.head.weight.detach().clone()
        scaler.step(update)
        scaler.update()
        update.zero_grad()
        found["loss"].append(value.item())
        found["skipped"].append(float(torch.equal(before, made.head.weight)))
    return found


def scaled(world: Any) -> dict[str, Any]:
    found = {}
    for strategy in STRATEGIES[world.place.world_size]:
        trainer = Trainer(
            model=model,
            loss=loss,
            optimizer=optimizer,
            data=items(),
            batch_size=ROWS,
            loading=nbkit.Loading(shuffle=False),
            strategy=strategy,
            precision="fp16",
            clip_norm=0.5,
            log_dir=None,
            progress=False,
        )
        trainer.job.precision.growth_interval = GROWS_AFTER
        still = []
        for _ in range(STEPS):
            before = [p.detach().clone() for p in trainer.job.sharded_model.held.values()]
            trainer.fit(1)
            still.append(
                all(torch.equal(a, b) for a, b in zip(before, trainer.job.sharded_model.held.values(), strict=True))
            )
        found[strategy] = {**{name: [r[name] for r in trainer.history] for name in NAMES}, "still": still}
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_float16_steps_are_scaled_and_skipped_as_in_torch_on_all_ranks(num_ranks: int) -> None:
    expected = one_process()
    assert [bool(skipped) for skipped in expected["skipped"]] == [step in BLOWN for step in range(STEPS)]
    assert set(expected["loss_scale"]) == {2.0**15, 2.0**16}
    for found in run_ranks(scaled, num_ranks, timeout=170):
        for strategy, history in found.items():
            assert history["skipped"] == expected["skipped"], strategy
            assert history["loss_scale"] == expected["loss_scale"], strategy
            assert history["still"] == [step in BLOWN for step in range(STEPS)], strategy
            kept = [step for step in range(STEPS) if step not in BLOWN]
            for name, rtol in (("loss", 2e-3), ("grad_norm", 2e-2)):
                ours, theirs = ([each[name][step] for step in kept] for each in (history, expected))
                assert ours == pytest.approx(theirs, rel=rtol), (strategy, name)


def alone(world: Any) -> list[Any]:
    precision = Precision("fp16", device=torch.device("cpu"), world_size=world.place.world_size)
    held = nn.Parameter(torch.zeros(3))
    found: list[Any] = []
    for wrong in (1, None):
        held.grad = torch.full((3,), float("inf") if world.place.rank == wrong else precision.scale)
        precision.unscale([held])
        found += [precision.may_step(), precision.scale]
    return [*found, held.grad.tolist()]


def test_an_infinite_gradient_on_one_rank_skips_the_update_on_all() -> None:
    assert run_ranks(alone, 2) == [[False, 2.0**15, True, 2.0**15, [1.0] * 3]] * 2


def carried(world: Any, path: str) -> list[Any]:
    def trainer() -> Trainer:
        asked: dict[str, Any] = {"model": model, "loss": loss, "optimizer": optimizer, "data": items()}
        return Trainer(
            **asked,
            batch_size=ROWS,
            loading=nbkit.Loading(shuffle=False),
            precision="fp16",
            log_dir=None,
            progress=False,
        )

    job, found = trainer(), []
    job.fit(2)
    found.append(job.job.precision.state_dict())
    job.switch("zero3")
    job.try_out("tp", steps=5)
    found.append(job.job.precision.state_dict())
    job.save(path)
    again = trainer()
    again.load(path)
    found.append(again.job.precision.state_dict())
    return found


@pytest.mark.long
def test_the_loss_scale_is_kept_through_switches_checkpoints_and_trials(tmp_path: Path) -> None:
    for found in run_ranks(carried, 2, str(tmp_path / "saved"), timeout=170):
        assert found == [{"scale": 2.0**15, "finite": 0}] * 3


def refused(world: Any) -> list[str]:
    found = []
    for made, wrong in ((lambda: model().half(), loss), (model, lambda output, target: loss(output, target) * 1e30)):
        with pytest.raises(TrainingError) as raised:
            trainer = Trainer(
                model=made,
                loss=wrong,
                optimizer=optimizer,
                data=items(),
                batch_size=ROWS,
                precision="fp16",
                log_dir=None,
                progress=False,
            )
            trainer.fit(60)
        found.append(str(raised.value))
    return found


def test_float16_weights_and_gradients_that_overflow_at_any_scale_are_refused() -> None:
    halves, never = run_ranks(refused, 1)[0]

    assert "float32 weights" in halves and "'tokens.weight'" in halves
    assert "not finite with any loss scale" in never and "bf16" in never


def test_bf16_on_a_gpu_that_emulates_it_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it, because torch says that a T4 supports bf16, which includes emulation."""
    t4, model = torch.device("cuda", 0), nn.Linear(2, 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(Accelerator, "name", lambda self, device: "Tesla T4")

    with pytest.warns(UserWarning, match=r"Tesla T4 has no bf16 .* precision='fp16'"):
        Precision("bf16", device=t4, world_size=1).check(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, device in (("bf16", torch.device("cpu")), ("fp16", t4), (None, t4)):
            Precision(name, device=device, world_size=1).check(model)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        Precision("bf16", device=t4, world_size=1).check(model)
