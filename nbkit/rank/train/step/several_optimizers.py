"""Combine several optimizers over parts of a model into one: for example Muon for the matrices and AdamW for the rest.

`SeveralOptimizers` has the groups of all of them, in order, and one mapping with all their states. The inner optimizers
use the same group and state objects. So learning rates, checkpoints and switches work as for one optimizer. For the
copies over a rank's parameters see optimizer_factory.py.

An average of the weights (weight_average.py) is kept in the same way. Its step comes after the steps of the optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nbkit.errors import TrainingError
from nbkit.rank.train.argument_checks import check_optimizer

Several = Sequence[Optimizer] | Mapping[str, Optimizer]
"""Optimizers over disjoint parameters; a mapping gives them names."""


class SeveralOptimizers(Optimizer):
    """Makes the steps of several optimizers, one after the other.

    optimizers: the list or dict that the user gave. average: a weight_average.KeptAverage, or None.
    """

    average: Any = None

    def __init__(self, optimizers: Several) -> None:
        super().__init__([{"params": []}], {})
        self.optimizers = dict(optimizers) if isinstance(optimizers, Mapping) else list(optimizers)
        self.param_groups = [group for each in self.each for group in each.param_groups]
        for each in self.each:
            # An optimizer that wraps another one has two states, and a parameter may have the same key in both.
            if not any(isinstance(value, Optimizer) or value is each.state for value in _beside_state(each)):
                self.state.update(each.state)
                each.state = self.state

    @property
    def each(self) -> list[Optimizer]:
        """The optimizers, in order."""
        return list(self.optimizers.values() if isinstance(self.optimizers, dict) else self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of each optimizer. Raise TypeError for a closure, because the gradients are computed already."""
        if closure is not None:
            raise TypeError("several optimizers share one backward pass: step() takes no closure")
        if self.average is not None:
            self.average.check()
        for each in self.each:
            each.step()
        if self.average is not None:
            self.average.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state, as torch does in load_state_dict, and share them with the inner optimizers again."""
        shared = [each.state is self.state for each in self.each]
        super().__setstate__(state)
        first = 0
        for each, shares in zip(self.each, shared, strict=True):
            groups = self.param_groups[first : first + len(each.param_groups)]
            first += len(groups)
            each.__setstate__({"param_groups": groups, "state": self.state if shares else each.state})
        if self.average is not None:
            self.average.param_groups = self.param_groups

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.each))


def _beside_state(optimizer: Optimizer) -> list[Any]:
    return [value for name, value in vars(optimizer).items() if name != "state"]


def together(made: Any, module: nn.Module) -> Any:
    """Combine `made` into one optimizer if it is a list or dict of optimizers. Otherwise return `made`.

    Raises TrainingError as check_optimizer does for each of them, and if a trained parameter of `module` is in none or
    in two of them.
    """
    if not isinstance(made, list | tuple | Mapping) or not made:
        return made
    named = made if isinstance(made, Mapping) else dict(enumerate(made))
    owners: dict[str, list[str]] = {name: [] for name, p in module.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in module.named_parameters()}
    for key, each in named.items():
        check_optimizer(each, module)
        for p in (p for group in each.param_groups for p in group["params"]):
            owners.setdefault(names[id(p)], []).append(f"{key} ({type(each).__name__})")
    if twice := [name for name, found in owners.items() if len(found) > 1]:
        raise TrainingError(
            "A parameter is in two of the optimizers, and each of them would update it.",
            numbers=f"{', '.join(map(repr, twice[:3]))}{', ...' * (len(twice) > 3)}, the first in "
            + " and ".join(owners[twice[0]]),
            hint="[torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]), "
            "torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])]",
        )
    if without := [name for name, found in owners.items() if not found]:
        raise TrainingError(
            "Some parameters that train are in none of the optimizers, so nothing would update them.",
            numbers=f"{len(without)} of {len(owners)}: {', '.join(map(repr, without[:3]))}"
            f"{', ...' * (len(without) > 3)}",
            hint="put them into one of the optimizers, or freeze them: p.requires_grad_(False)",
        )
    return SeveralOptimizers(made)
