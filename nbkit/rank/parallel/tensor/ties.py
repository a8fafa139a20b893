"""Tied weights: a weight that several modules hold is cut in the same way in all of them, or stays whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import replace

from torch import nn

from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan, cuts_of_pair, cuts_of_single

Place = tuple[int, str]
"""(id of a module, attribute)."""


def agreed(
    model: nn.Module, plan: TensorPlan, said: Collection[str] = (), *, trusted: Callable[[nn.Module], bool]
) -> TensorPlan:
    """Return `plan` without the splits that would cut a tied weight differently in its places.

    said: modules whose roles the user gave; conflicts with those are kept, and refused later. trusted: returns True for
    a module that is not a map and does not compute with the weight it holds, like HF's heads with the bias of a map.
    """
    tied = {name: places for name, places in homes(model).items() if len(places) > 1}
    while tied:
        cuts: dict[Place, tuple[Hashable, str]] = {}
        for pair in plan.pairs:
            for part, attribute, *how in cuts_of_pair(model, pair):
                cuts[id(part), attribute] = tuple(how), pair.rows[0]
        for path, role in plan.singles.items():
            for part, attribute, *how in cuts_of_single(model.get_submodule(path), role):
                cuts[id(part), attribute] = tuple(how), path
        out: dict[str, str] = {}
        for name, places in tied.items():
            wanted = [
                cuts.get((id(part), attribute))
                for part, attribute in places
                if (id(part), attribute) in cuts or _computes(part) or not trusted(part)
            ]
            if len({None if each is None else each[0] for each in wanted}) > 1:
                keys = {each[1] for each in wanted if each is not None}
                why = f"{name} is tied in {len(places)} places, which do not all take the same part of it"
                out |= {} if keys & set(said) else dict.fromkeys(keys, why)
        if not out:
            break
        plan = without(plan, out)
    return plan


def _computes(part: nn.Module) -> bool:
    return is_linear(part) or isinstance(part, nn.Linear | nn.Embedding | nn.MultiheadAttention)


def without(plan: TensorPlan, out: dict[str, str]) -> TensorPlan:
    """Return `plan` without the pairs (by row map) and single modules in `out`, whose values become the reasons."""
    kept = tuple(pair for pair in plan.pairs if pair.rows[0] not in out)
    reasons = dict(plan.reasons) | {path: why for path, why in out.items() if path in plan.singles}
    for pair in plan.pairs:
        if pair.rows[0] in out:
            members = (pair.owner,) if pair.kind == "module" else (*pair.columns, *pair.rows)
            reasons |= dict.fromkeys(members, out[pair.rows[0]])
    singles = {path: role for path, role in plan.singles.items() if path not in out}
    return replace(plan, pairs=kept, singles=singles, reasons=reasons)
