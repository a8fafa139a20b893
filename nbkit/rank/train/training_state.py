"""The state that a switch replaces and that going back restores, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nbkit.rank.parallel.reshard.plain_attributes import take_along, take_objects_along
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.step.model_handle import Shown, shown_by


@dataclass(frozen=True)
class TrainingState:
    """The state of a training between two steps on this rank.

    shown: what the modules of the sharded model show. They may be the user's own modules, which take on the attributes
    of the state in force. position: in the data. precision: the loss scale (see Precision.state_dict).
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    shown: Shown
    step: int
    position: Any
    precision: dict[str, Any]

    def under(self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Return the same place in the training, with another sharded model and its optimizer.

        The model takes plain attributes along, and others too if it is known to change them as it runs.
        """
        old, facts = self.sharded_model, sharded_model.plan.facts
        take_along(old.module, old.built, sharded_model.module, left=facts.caches)
        if facts.outside is not None:
            take_objects_along(self.sharded_model.module, sharded_model.module)
        return replace(self, sharded_model=sharded_model, optimizer=optimizer, shown=shown_by(sharded_model.module))
