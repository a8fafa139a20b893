"""What strategies need to know of a model, found by running it: for those strategies alone that somebody asks for.

Each fact is an attribute of `Options`, or several that are found together. It is found once for a model, on one rank,
and told to the others. `Options.looked` has the names of those that were looked for, found or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.parallel.context.positionwise import try_in_parts
from nbkit.rank.parallel.module.copies import runnable
from nbkit.rank.parallel.options import Options
from nbkit.rank.parallel.pipeline.layer_chain import find_chain, hidden_between, measure_costs
from nbkit.rank.parallel.proof.unchanged import DroppingNothing, set_evaluation
from nbkit.rank.parallel.tensor.proof.prove import prove
from nbkit.rank.parallel.zero3.gather_plan import plan_gathers
from nbkit.rank.rng.keyed_dropout import repeating
from nbkit.rank.rng.seeding import generators_left_alone
from nbkit.strategy import Strategy

FOUND = ("looked", "chain", "no_chain", "costs", "hidden", "proof", "gathers", "positionwise")
"""Attributes of Options that are found here."""


@dataclass(frozen=True)
class ModelRuns:
    """How the model is run on the example. batch: the example. whole: one pass over it; loss: of what that gives.

    brief, brief_loss: the same on a few positions of each row. autocast: the dtype in which it trains, if another.
    """

    batch: Any
    whole: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    brief: Callable[[], Any]
    brief_loss: Callable[[Any], Tensor]
    stages: Sequence[str] | None = None
    autocast: torch.dtype | None = None


def facts_for(strategy: Strategy) -> frozenset[str]:
    """Names of the facts that `strategy` is built by and that its cost is predicted by; none where ranks part rows
    alone."""
    found: set[str] = set()
    if strategy.tp > 1:
        found |= {f"tp={strategy.tp}", "chain"}
    if strategy.zero == 3:
        found |= {"gathers", "chain"}
    if strategy.pp > 1:
        found |= {"chain", "costs"}
    if strategy.cp > 1:
        found |= {"chain", "positionwise"}
    return frozenset(found)


def lacking(options: Options, strategies: Iterable[Strategy]) -> frozenset[str]:
    """Return what was not looked for, of what `strategies` need; nothing where there is no example to run."""
    if options.looked is None:
        return frozenset()
    wanted: frozenset[str] = frozenset().union(*map(facts_for, strategies))
    return wanted - options.looked


def find_facts(module: nn.Module, runs: ModelRuns, options: Options, wanted: Collection[str]) -> dict[str, Any]:
    """Attributes of Options, in which the facts `wanted` have been looked for; whatever goes wrong is in them.

    module: whole, as it trains; it is afterwards as before. Let other ranks be idle meanwhile: seconds are measured.
    """
    found: dict[str, Any] = {"looked": (options.looked or frozenset()) | frozenset(wanted)}
    if sizes := sorted(int(name.removeprefix("tp=")) for name in wanted if name.startswith("tp=")):
        proof = prove(module, runs.whole, sizes, options.tp_plan, brief=runs.brief)
        verdicts = {**options.proof.verdicts, **proof.verdicts}
        found["proof"] = replace(proof, verdicts=verdicts, flow=proof.flow or options.proof.flow)
    if "gathers" in wanted:
        with suppress(Exception):
            # What is wrong with the model is said, in full, where it is trained.
            found["gathers"] = plan_gathers(
                module,
                lambda: runs.loss(runs.whole()),
                brief=lambda: runs.brief_loss(runs.brief()),
                autocast=runs.autocast,
            )
    try:
        _along_the_chain(module, runs, options, wanted, found)
    except Exception as error:
        found["no_chain"] = str(error) if isinstance(error, NbkitError) else f"{type(error).__name__}: {error}"
    return found


def _along_the_chain(
    module: nn.Module, runs: ModelRuns, options: Options, wanted: Collection[str], found: dict[str, Any]
) -> None:
    chain = options.chain
    if "chain" in wanted:
        with repeating(module, options.draws, runs.batch) as drawing:
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
        with repeating(module, options.draws, runs.batch) as drawing:
            found["positionwise"] = try_in_parts(module, chain.units, lambda: drawing(runs.whole), runs.loss)


class _evaluating:
    """Inside, the module is in evaluation; afterwards each part is in its own mode."""

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
    options: Options,
    wanted: Collection[str],
    *,
    beside: bool,
) -> dict[str, Any]:
    """As find_facts, where the whole model is no more: of its shapes, with weights that take no memory.

    beside: in a thread beside a training, whose random numbers stay as they are. {} then for a model that draws some
    itself: it can only be looked at between two steps.
    """
    if beside and options.draws is not None:
        return {}
    with ExitStack() as around:
        if beside:
            around.enter_context(generators_left_alone())
            around.enter_context(DroppingNothing())
        try:
            module = runnable(skeleton)
            return find_facts(module, runs_of(module), options, wanted)
        except Exception as error:
            if beside:
                raise
            # Other ranks wait to be told.
            looked = (options.looked or frozenset()) | frozenset(wanted)
            return {"looked": looked, "no_chain": f"{type(error).__name__}: {error}"}


def need_facts(options: Options, strategy: Strategy) -> None:
    """Raises StrategyError where the model was not looked at for `strategy` yet: nobody knows whether it fits."""
    if lacking(options, [strategy]):
        raise StrategyError(
            f"Whether {strategy} fits this model is not known yet.",
            numbers="the model is run to see it, on a few rows, before a switch",
            hint=f"%strategy {strategy}   or   trainer.switch('{strategy}')",
        )


def told(options: Options) -> Mapping[str, Any]:
    """Return what one rank tells the others."""
    return {name: getattr(options, name) for name in FOUND}
