"""Describe a model for a plan: prove how it can be split, and measure its costs, before the planned devices exist.

This runs two rows on the CPU in one process, without a process group. Memory and work are measured by runs on tensors
without memory (model_trace), with the model split for each degree of tp and cp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nbkit.errors import StrategyError, UsageError
from nbkit.planner.choose.search import LEAST_POSITIONS
from nbkit.planner.job_facts import Facts
from nbkit.planner.peak import ModelPiece, Weights
from nbkit.rank.data.batch import check_inputs, pair, rows_of, take
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.fact_finder import find_facts
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes
from nbkit.rank.parallel.module.block_discovery import experts_in
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.plan import make_plan
from nbkit.rank.parallel.proof.short_example import first_runs
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.estimate.cost_model import transformer_facts
from nbkit.rank.train.estimate.model_trace import ModelTrace
from nbkit.rank.train.estimate.peak_bytes import PeakBytes
from nbkit.rank.train.estimate.state_bytes import StateBytes
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.rank.train.step.precision import PRECISIONS
from nbkit.strategy import Strategy
from nbkit.trainer_options import ModelHints

LARGEST = 4 << 30
"""A model with more bytes of parameters is refused."""
_ROWS = 2


@dataclass(frozen=True)
class MeasuredModel:
    """A measured model, with the same attributes as a Builder."""

    skeleton: nn.Module
    facts: ModelFacts
    options: JobOptions
    config: TrainConfig
    template: OptimizerSpec
    device: torch.device
    link: None = None


def describe(
    model: nn.Module | Callable[[], nn.Module],
    example: Any,
    *,
    loss: Loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    inputs: Sequence[str] | None = None,
    precision: str | None = None,
    degrees: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> ModelPieces:
    """Measure `model` and return its pieces. The model is unchanged afterwards.

    example: a batch; the model runs on two rows of it. optimizer: default AdamW. degrees: degrees of tp to prove. say:
    called with messages about progress. Raises UsageError if the model is too large to run here, and errors of the
    model.
    """
    check_inputs(inputs)
    module = model if isinstance(model, nn.Module) else model()
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    if size > LARGEST:
        raise UsageError(
            "The model is too large to be run here.",
            numbers=f"{size / 1e9:.3g} GB of parameters, at most {LARGEST / 1e9:.3g}",
            hint="a GPTConfig of its sizes, or strategy='auto' of a Trainer on the ranks that are to train it",
        )
    example = take(example, 0, min(_ROWS, rows_of(example)), rows=rows_of(example))
    say("runs two rows of the model")
    look = first_runs(module, example, inputs=inputs, loss=loss, parts=max(degrees, default=1))
    config = TrainConfig(loss, inputs=inputs, precision=precision, hints=ModelHints(example=example))
    runs = config.model_example.runs(module, look.short, torch.device("cpu"))
    with torch.no_grad():
        # Raise errors of the model here.
        weigh(loss(runs.whole(), pair(example, inputs)[1]), rows_of(example))
    skeleton = skeleton_of(module)
    facts = ModelFacts(ModelShapes(skeleton), experts=experts_in(module), draws=look.draws)
    for wanted in ([f"tp={size}" for size in degrees] + ["gathers", "chain"], ["positionwise"]):
        if wanted != ["positionwise"] or (facts.hidden is not None and facts.hidden[0] >= 2 * LEAST_POSITIONS):
            say(f"proves how it can be split: {', '.join(wanted)}")
            facts = facts.updated(find_facts(module, runs, facts, wanted))
    facts = replace(facts, looked=None)  # no job will find the missing facts later, such as seconds of the blocks
    made = OptimizerSpec(optimizer or (lambda m: torch.optim.AdamW(m.parameters())), module=module)
    return ModelPieces(MeasuredModel(skeleton, facts, JobOptions(), config, made, torch.device("cpu")), say)


@dataclass(frozen=True)
class Average:
    """Average bytes per element of a model; see planner.memory.Bytes."""

    parameter: float
    gradient: float
    optimizer: float


class ModelPieces:
    """A measured model as the subject of a plan; see planner.choose.load.Subject.

    recompute: see Compute. plain: the same model without recomputation, if this one recomputes its blocks. The two
    differ only in the measured memory. say: called with messages about progress.
    """

    def __init__(
        self,
        of: MeasuredModel,
        say: Callable[[str], None],
        *,
        recompute: bool | str = False,
        plain: ModelPieces | None = None,
    ) -> None:
        self._of, self._say, self._plain, self._recompute = of, say, plain or self, recompute
        self._others: dict[bool | str, ModelPieces] = {}
        kinds = of.template.kinds(of.skeleton)
        trained = {name for name, p in of.skeleton.named_parameters() if p.requires_grad}
        self._kinds = kinds
        self._peaks = PeakBytes(of, StateBytes(of.facts, kinds, trained, options=of.options), recompute=recompute)

    @property
    def name(self) -> str:
        """Return the class name and the size of the model, as text to show."""
        count = sum(p.numel() for p in self._of.skeleton.parameters())
        size = f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M" if count >= 1e5 else f"{count:,}"
        return f"{type(self._of.skeleton).__name__} of {size} parameters"

    @cached_property
    def each(self) -> Average:
        """Return the average bytes per element. Frozen parameters have no gradient and no state."""
        sizes = {name: (p.numel(), p.element_size(), p.requires_grad) for name, p in self._named()}
        count = sum(numel for numel, _, _ in sizes.values())
        state = {name: sum(n for kind, n in one.items() if kind != "weight") for name, one in self._kinds.items()}
        return Average(
            sum(numel * size for numel, size, _ in sizes.values()) / count,
            sum(numel * size for numel, size, trained in sizes.values() if trained) / count,
            sum(numel * state[name] for name, (numel, _, _) in sizes.items()) / count,
        )

    @property
    def element(self) -> int:
        """Return the bytes per element of activations."""
        dtype = PRECISIONS.get(self._of.config.precision or "")
        return dtype.itemsize if dtype is not None else torch.get_default_dtype().itemsize

    def recomputing(self, recompute: bool | str) -> ModelPieces:
        """Return the same model with this value of `recompute`."""
        plain = self._plain
        if recompute and recompute not in plain._others:
            plain._others[recompute] = ModelPieces(self._of, self._say, recompute=recompute, plain=plain)
        return plain._others[recompute] if recompute else plain

    def pieces(self, tp: int, cp: int) -> tuple[ModelPiece, ...]:
        """Return one piece for each block, on a rank with these degrees."""
        return self._traced(tp, cp).pieces

    def weights(self, tp: int, cp: int) -> list[Weights]:
        """Return the weights of each piece, not sharded along dp, and the bytes that zero 3 saves by casting first."""
        traced, axes = self._plain._traced(tp, cp), Strategy(dp=2, tp=tp, cp=cp, zero=3, shard=2)
        return self._peaks.weights(axes, [(0, len(traced.pieces))], traced.partial)

    def flops(self, tp: int, cp: int) -> float:
        """Return the floating-point operations of one row's forward pass on a rank with these degrees."""
        return self._plain._traced(tp, cp).flops

    def touched(self, tp: int, cp: int) -> float:
        """Return the bytes that one row's forward pass reads and writes: those of the whole model, divided by tp * cp.

        The split model is not measured, because the stand-ins for its collectives would be counted too.
        """
        return self._plain._traced(1, 1).touched / (tp * cp)

    def costs(self) -> tuple[float, ...]:
        """Return the multiplications of each piece; the last includes the head. All are 1.0 if there are none."""
        found = self._plain._traced(1, 1).costs
        return found if any(found) else (1.0,) * len(found)

    def facts(self, batch: int) -> Facts:
        """Return the facts for checking a strategy. batch: rows of the global batch."""
        return replace(self._facts, batch=batch)

    def refused(self, strategy: Strategy) -> tuple[str, str] | None:
        """Return (what, numbers) if `strategy` cannot split the model or its costs are unknown; otherwise None."""
        if (strategy.tp > 1 or strategy.cp > 1) and self._facts.width is None:
            axes = f"tp={strategy.tp} cp={strategy.cp}"
            return "nbkit knows the messages only of transformer blocks, each with an attention and an MLP.", axes
        try:
            make_plan(strategy, self._of.facts, self._of.options)
        except StrategyError as error:
            return error.what, error.numbers or ""
        return None

    @cached_property
    def _facts(self) -> Facts:
        found = transformer_facts(self._of.facts, self._of.options)
        chain = self._of.facts.chain
        return found if found.blocks is not None else Facts(blocks=len(chain) if chain is not None else None)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._of.skeleton.named_parameters())

    def _traced(self, tp: int, cp: int) -> ModelTrace:
        if not self._peaks.knows(tp, cp):
            again = ", recomputed" * bool(self._recompute) + " in part" * (self._recompute == "selective")
            self._say(f"measures it on tensors without memory: tp={tp} cp={cp}{again}")
        traced = self._peaks.traced(tp, cp)
        if traced is None:
            raise UsageError(
                "The model does not run on meta tensors, so its memory could not be measured.",
                numbers=f"tp={tp} cp={cp}",
                hint="strategy='auto' of a Trainer, on the ranks that are to train it",
            )
        return traced
