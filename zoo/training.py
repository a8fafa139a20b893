"""One cell trained: on ranks through the Trainer, and in one process by a loop in plain torch; and what check says."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from models_zoo import Specimen
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

import nbkit
from nbkit.errors import NbkitError
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.check_model import check
from nbkit.rank.train.trainer import Trainer
from zoo.cells import CHAIN, Cell
from zoo.image_models import IMAGES
from zoo.plain_models import PLAIN
from zoo.transformers_models import TRANSFORMERS

SUBJECTS: dict[str, Specimen] = {**PLAIN, **IMAGES, **TRANSFORMERS}

ROWS, STEPS, LR = 8, 3, 0.05
LONGEST = max(STEPS, len(CHAIN))


@dataclass(frozen=True)
class Known:
    """Of one model in one process. before: its state; after: steps -> its state then.

    checks: strategy -> ("fits" | "refused" | "crash", text).
    rounds: what it computes passes through float32 on the way.
    """

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[int, dict[str, Tensor]]
    rounds: bool
    checks: dict[str, tuple[str, str]]


@dataclass
class Found:
    """Of one cell on one rank. made: steps; refused: strategy -> why; late: the refusal that ended it after a step."""

    losses: list[float] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    made: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    late: str = ""


class _Casts(TorchDispatchMode):
    """Notices what is rounded from double to single precision."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64 and args[0].numel() > 1:
            self.seen |= result.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return result


def items(subject: str) -> list[tuple[Any, Any]]:
    """As many samples as the longest training takes."""
    value, target = SUBJECTS[subject].batch(ROWS * LONGEST, dtype=torch.float64)
    return [(_row(value, i), target[i]) for i in range(ROWS * LONGEST)]


def _row(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return {key: _row(part, i) for key, part in value.items()}
    return tuple(_row(part, i) for part in value) if isinstance(value, tuple) else value[i]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)


def known(rank: int, subject: str, strategies: tuple[str, ...]) -> Known:
    """What `subject` does in one process, and what check says of it under each of `strategies`."""
    specimen = SUBJECTS[subject]
    model, data = specimen.build(torch.float64), items(subject)
    batches = [default_collate(data[first : first + ROWS]) for first in range(0, len(data), ROWS)]
    checks = {strategy: _checked(model, strategy, batches[0], specimen.loss) for strategy in strategies}
    model, losses, after, casts = specimen.build(torch.float64), [], {}, _Casts()
    before, optimizer = _state(model), _optimizer(model)
    for value, target in batches:
        with casts:
            loss = specimen.loss(call(model, value), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        after[len(losses)] = _state(model)
    return Known(losses, before, after, casts.seen, checks)


def _checked(model: nn.Module, strategy: str, batch: Any, loss: Any) -> tuple[str, str]:
    try:
        told = check(model, strategy, batch, Cell("", strategy).ranks, loss=loss)
    except NbkitError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return ("fits", "") if told.ok else ("refused", "; ".join(str(each) for each in told.findings if each.error))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def ours(cell: Cell) -> Found:
    """Trained by nbkit, on all ranks of the world. Collective. What is no refusal is raised."""
    found, specimen = Found(), SUBJECTS[cell.subject]
    first, *others = cell.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(
                model=lambda: specimen.build(torch.float64),
                loss=specimen.loss,
                optimizer=_optimizer,
                data=items(cell.subject),
                batch_size=ROWS,
                loading=nbkit.Loading(shuffle=False),
                strategy=first,
                compute=nbkit.Compute(grad_norm_every=1),
                log_dir=None,
                progress=False,
            )
            trainer.fit(1)
        except NbkitError as error:
            found.refused[first] = str(error)
            return found
        try:
            for strategy in others:
                try:
                    trainer.switch(strategy)
                except NbkitError as error:
                    found.refused[strategy] = str(error)
                trainer.fit(1)
            if not others:
                trainer.fit(STEPS - 1)
        except NbkitError as error:
            found.late = str(error)
        found.made = trainer.step
        if not found.late:
            found.losses = [record["loss"] for record in trainer.history]
            found.after = trainer.full_state_dict()
    return found
