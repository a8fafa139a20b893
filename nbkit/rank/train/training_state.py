"""The state that a switch replaces and that the way back restores: one value, handed on whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nbkit.rank.parallel.reshard.plain_attributes import take_along, take_objects_along
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.step.model_handle import Shown, shown_by


@dataclass(frozen=True)
class TrainingState:
    """Where a training stands between two steps on this rank.

    shown: by the sharded model's modules. They may be the user's own, which take on the attributes of whatever is in
    force. position: in the data. precision: the loss scale (see Precision.state_dict).
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    shown: Shown
    step: int
    position: Any
    precision: dict[str, Any]

    def under(
        self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, *, objects: bool = False
    ) -> TrainingState:
        """The same place in the training, with another sharded model, which takes plain attributes along, and its
        optimizer. objects: the model changes others too as it runs."""
        take_along(self.sharded_model.module, self.sharded_model.built, sharded_model.module)
        if objects:
            take_objects_along(self.sharded_model.module, sharded_model.module)
        return replace(self, sharded_model=sharded_model, optimizer=optimizer, shown=shown_by(sharded_model.module))
