"""Average the weights over steps: an exponential moving average, or the equal mean of Izmailov et al. 2018 (SWA).

The average of a parameter is part of the optimizer state, for the elements that this rank updates. So it is spread over
the ranks like that state. A switch, a checkpoint, a rewind and the replacement of a rank keep it, like a moment of
Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import any_rank
from nbkit.rank.train.step.optimizer_mode import change_weights, meet_between_steps
from nbkit.rank.train.step.several_optimizers import SeveralOptimizers, together


@dataclass(frozen=True)
class WeightAverage:
    """An average of the weights, as a callback of the Trainer.

    decay: average = decay * average + (1 - decay) * weight; None averages all steps equally. start: the number of the
    step whose weights are the first average. every: average the weights of every n-th step. The results are those of
    torch.optim.swa_utils.AveragedModel. The average of a 16-bit weight is kept in float32. Buffers are not averaged.

    Pass it to `Trainer(callbacks=[average])`, or pass `average.of(optimizer)` to `nbkit.prepare`. `shown` replaces the
    weights by the averages for a while. Raises TrainingError if `decay` is not between 0 and 1, or if `start` or
    `every` is not an integer of at least 1.
    """

    decay: float | None = None
    start: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        counts = all(type(count) is int and count >= 1 for count in (self.start, self.every))
        if not counts or not (self.decay is None or 0 < self.decay < 1):
            raise TrainingError(
                "decay must be between 0 and 1, and start and every must be whole numbers of at least 1.",
                numbers=repr(self),
                hint="nbkit.WeightAverage(decay=0.999)   or   nbkit.WeightAverage(start=1000, every=100)",
            )

    def __call__(self, trainer: Any, record: dict[str, Any]) -> None:
        """Do nothing: each step of the optimizer updates the average."""

    def of(self, optimizer: Any) -> Callable[[nn.Module], Optimizer]:
        """Return a factory that takes the model and returns `optimizer`, extended to update this average in each step.

        optimizer: an optimizer, a list or dict of several, or a callable that takes the model and returns one of these.
        """

        def averaged(module: nn.Module) -> Optimizer:
            made: Any = together(optimizer(module) if callable(optimizer) else optimizer, module)
            several = made if isinstance(made, SeveralOptimizers) else SeveralOptimizers([made])
            several.average = KeptAverage(several, self)
            return several

        return averaged

    @contextmanager
    def shown(self, training: Any) -> Iterator[None]:
        """Replace the weights by the averages inside, on every rank. Collective, between two steps.

        training: a Trainer or a job. Inside, you can evaluate, generate, or gather the weights by `full_state_dict`. A
        step, a switch, a save or a load is refused. Afterwards the weights are restored. Raises TrainingError if there
        is no average yet.
        """
        job = getattr(training, "job", training)
        meet_between_steps(job, "WeightAverage.shown")
        refuse_shown(job, "another WeightAverage.shown")
        average, begun = average_of(job), job.waits_for_update or bool(job.own_forward.losses)
        found = {} if average is None else average.of(job.sharded_model.held.values())
        if begun or not any_rank(bool(found), device=job.device):
            no_step = f"; it begins with step {self.start}" if average is not None else ""
            raise TrainingError(
                "There is no average of the weights to show here.",
                numbers=f"within step {job.step + 1}" if begun else f"after {job.step} steps{no_step}",
                hint="Trainer(callbacks=[average])   or   nbkit.prepare(model, average.of(optimizer)); then show it "
                "between two steps",
            )
        assert average is not None
        kept = {p: p.detach().clone() for p in found}
        try:
            change_weights(job, partial(_put, found))
            average._is_shown = True
            yield
        finally:
            average._is_shown = False
            change_weights(job, partial(_put, kept))


def averaging(callbacks: Sequence[Any], optimizer: Any) -> tuple[Any, list[Any]]:
    """Return (`optimizer`, which updates the WeightAverage of `callbacks` if there is one; the other callbacks).

    Raises TrainingError for two averages.
    """
    averages = [each for each in callbacks if isinstance(each, WeightAverage)]
    if len(averages) > 1:
        raise TrainingError(
            "A training can keep only one average of its weights.",
            numbers=f"{len(averages)} among the callbacks",
            hint="callbacks=[nbkit.WeightAverage(decay=0.999)]",
        )
    others = [each for each in callbacks if not isinstance(each, WeightAverage)]
    return (averages[0].of(optimizer) if averages else optimizer), others


def _put(values: dict[nn.Parameter, Tensor]) -> None:
    for p, value in values.items():
        p.copy_(value)


def average_of(job: Any) -> KeptAverage | None:
    """Return the averages that the optimizer of `job` keeps on this rank, or None."""
    several = job.optimizer.inner
    return several.average if isinstance(several, SeveralOptimizers) else None


def refuse_shown(job: Any, what: str) -> None:
    """Raise TrainingError if the model shows the averages now. what: the action to refuse."""
    if (average := average_of(job)) is not None and average.is_shown:
        raise _shown(what, f"step {job.step}")


def _shown(what: str, numbers: str) -> TrainingError:
    return TrainingError(
        f"{what} would use the averages instead of the weights, which are put aside.",
        numbers=f"{numbers}, within WeightAverage.shown",
        hint="end the block `with average.shown(trainer):` before it",
    )


class KeptAverage(Optimizer):
    """Keeps an average of every parameter of `several`. Its step comes after the steps of the optimizers."""

    def __init__(self, several: SeveralOptimizers, settings: WeightAverage) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups, self.settings = several.param_groups, settings
        self._is_shown = False

    @property
    def is_shown(self) -> bool:
        """Return True if the model shows the averages instead of the weights."""
        return self._is_shown

    def of(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return parameter -> its average, for each of `params` that has one."""
        every = ((p, self.state[p].get("average")) for p in params if p in self.state)
        return {p: value for p, value in every if value is not None}

    def check(self) -> None:
        """Raise TrainingError if a step now would update the averages instead of the weights."""
        if self.is_shown:
            raise _shown("A step", "the optimizer's step")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the averages with the weights, in the steps that the settings select."""
        start, every, decay = self.settings.start, self.settings.every, self.settings.decay
        # By device, dtype and number of averaged steps, which differs for parameters that were added later or loaded.
        alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state["steps"] = state.get("steps", 0) + 1
            taken, rest = divmod(state["steps"] - start, every)
            if taken < 0 or rest:
                continue
            dtype = p.dtype if p.element_size() > 2 else torch.float32
            if "average" not in state:
                state["average"] = p.detach().to(dtype, copy=True)
                continue
            averages, weights = alike.setdefault((p.device, dtype, taken), ([], []))
            averages.append(state["average"])
            weights.append(p.detach().to(dtype))
        for (_, _, taken), (averages, weights) in alike.items():
            move = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
            move(averages, weights, taken)
