"""Find the facts of a model that strategies need, by running the model. Find only those that are asked for.

Each fact is an attribute of `ModelFacts`, or several attributes that are found together. A fact is found once for a
model, on one rank, and is sent to the others. `ModelFacts.looked` has the names of the facts that were looked for,
found or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import NbkitError
from nbkit.rank.data.batch import call, on_device, pair, rows_of
from nbkit.rank.data.sample_rows import Sample
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.context.positionwise import try_in_parts
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.parallel.module.copies import runnable
from nbkit.rank.parallel.pipeline.layer_chain import find_chain, hidden_between, measure_costs
from nbkit.rank.parallel.proof.unchanged import DroppingNothing, set_evaluation
from nbkit.rank.parallel.tensor.proof.prove import prove
from nbkit.rank.parallel.zero3.gather_plan import plan_gathers
from nbkit.rank.rng.keyed_dropout import repeating
from nbkit.rank.rng.seeding import generators_left_alone


@dataclass(frozen=True)
class ModelRuns:
    """The ways to run the model on the example.

    batch: the example. whole: runs the model once on it. brief: the same on a few positions of each row. loss,
    brief_loss: the loss of their outputs; None if no loss is known. stages, tp_plan: what the user said of its blocks
    and layers. autocast: the dtype in which the model trains, if it is another one.
    """

    batch: Any
    whole: Callable[[], Any]
    loss: Callable[[Any], Tensor] | None
    brief: Callable[[], Any]
    brief_loss: Callable[[Any], Tensor] | None
    stages: Sequence[str] | None = None
    tp_plan: Mapping[str, str] | None = None
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class ModelExample:
    """The rows on which the facts of a model are found, and how the model and the loss run on them.

    batch: a few rows; None if nothing can be run. loss: None if it is not known. sample: reads the rows on which the
    loss is examined; None: those of `batch`. parts_rows: rows of a batch go through several forwards. stages, tp_plan,
    autocast: see ModelRuns.
    """

    batch: Any
    loss: Loss | None
    inputs: Sequence[str] | None = None
    sample: Callable[[], Sample | None] | None = None
    parts_rows: bool = False
    stages: Sequence[str] | None = None
    tp_plan: Mapping[str, str] | None = None
    autocast: torch.dtype | None = None

    def runs(self, module: nn.Module, short: Any, device: torch.device) -> ModelRuns:
        """Return how `module`, the whole model, is run. short: few positions of the rows that show as much."""
        few = self.batch if short is None else short
        return ModelRuns(
            self.batch,
            lambda: call(module, pair(on_device(self.batch, device), self.inputs)[0]),
            self._loss_of(self.batch, device),
            lambda: call(module, pair(on_device(few, device), self.inputs)[0]),
            self._loss_of(few, device),
            self.stages,
            self.tp_plan,
            self.autocast,
        )

    def _loss_of(self, rows: Any, device: torch.device) -> Callable[[Any], Tensor] | None:
        loss = self.loss
        if loss is None:
            return None

        def of(output: Any) -> Tensor:
            return weigh(loss(output, pair(on_device(rows, device), self.inputs)[1]), rows_of(rows)).value

        return of


def find_facts(module: nn.Module, runs: ModelRuns, facts: ModelFacts, wanted: Collection[str]) -> dict[str, Any]:
    """Look for the facts `wanted` and return them as attributes of ModelFacts. Failures are stored in them too.

    module: whole, in training mode. It is left as it was. Other ranks must be idle meanwhile, because seconds are
    measured.
    """
    found: dict[str, Any] = {"looked": (facts.looked or frozenset()) | frozenset(wanted)}
    if sizes := sorted(int(name.removeprefix("tp=")) for name in wanted if name.startswith("tp=")):
        proof = prove(module, runs.whole, sizes, runs.tp_plan, brief=runs.brief)
        verdicts = {**facts.proof.verdicts, **proof.verdicts}
        found["proof"] = replace(proof, verdicts=verdicts, flow=proof.flow or facts.proof.flow)
    if "gathers" in wanted:
        with suppress(Exception):
            # Training reports in full what is wrong with the model.
            found["gathers"] = plan_gathers(
                module,
                _followed_by(runs.loss, runs.whole),
                brief=_followed_by(runs.brief_loss, runs.brief),
                autocast=runs.autocast,
            )
    try:
        _along_the_chain(module, runs, facts, wanted, found)
    except Exception as error:
        found["no_chain"] = str(error) if isinstance(error, NbkitError) else f"{type(error).__name__}: {error}"
    return found


def _followed_by(loss: Callable[[Any], Tensor] | None, run: Callable[[], Any]) -> Callable[[], Any]:
    return run if loss is None else lambda: loss(run())


def _along_the_chain(
    module: nn.Module, runs: ModelRuns, facts: ModelFacts, wanted: Collection[str], found: dict[str, Any]
) -> None:
    chain = facts.chain
    if "chain" in wanted:
        with repeating(module, facts.draws, runs.batch) as drawing:
            chain = find_chain(
                module, lambda: drawing(runs.whole), stages=runs.stages, brief=lambda: drawing(runs.brief)
            )
        with _evaluating(module):
            found["chain"], found["hidden"] = chain, hidden_between(module, chain, runs.whole)
    if chain is None:
        return
    if "costs" in wanted:
        with _evaluating(module):
            found["costs"] = measure_costs(module, chain, runs.whole)
    if "positionwise" in wanted:
        with repeating(module, facts.draws, runs.batch) as drawing:
            found["positionwise"] = try_in_parts(module, chain.units, lambda: drawing(runs.whole), runs.loss)


class _evaluating:
    """Sets the module to evaluation inside. Afterwards each part is in its own mode again."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._modes = module, [(part, part.training) for part in module.modules()]

    def __enter__(self) -> None:
        set_evaluation(self._module)

    def __exit__(self, *_: object) -> None:
        for part, mode in self._modes:
            part.training = mode


def find_later(
    skeleton: nn.Module,
    runs_of: Callable[[nn.Module], ModelRuns],
    facts: ModelFacts,
    wanted: Collection[str],
    *,
    beside: bool,
) -> dict[str, Any]:
    """Do what find_facts does when the whole model no longer exists. It uses the shapes, with weights that take no
    memory.

    beside: run in a thread beside a training, whose random numbers stay as they are. Then return {} for a model that
    draws random numbers itself: it can only be looked at between two steps.
    """
    if beside and facts.draws is not None:
        return {}
    with ExitStack() as around:
        if beside:
            around.enter_context(generators_left_alone())
            around.enter_context(DroppingNothing())
        try:
            module = runnable(skeleton)
            return find_facts(module, runs_of(module), facts, wanted)
        except Exception as error:
            if beside:
                raise
            # The other ranks wait for an answer.
            looked = (facts.looked or frozenset()) | frozenset(wanted)
            return {"looked": looked, "no_chain": f"{type(error).__name__}: {error}"}
