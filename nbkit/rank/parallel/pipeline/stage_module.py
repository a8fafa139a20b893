"""A rank's stages of a pipeline: the user's model with only some of its parameters, run piece by piece.

A parameter that a rank does not hold is None in its module, as torch writes a bias that does not exist. So the module
lists exactly this rank's parameters under their original names. The model finds an `Absent` in the place of the others.
A tied weight stays tied, and is on every rank that uses it. Its gradient is the sum over those ranks. Other modules
make this sum and send everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.absent_parameter import Absent, list_absent
from nbkit.rank.parallel.module.copies import homes, put_aliases, replace_submodule
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.pipeline.partial_forward import StageBoundaries


class Staged:
    """The parts of `chain` that one rank runs. `module` is changed in place.

    ranges: (lo, hi) per stage of this rank: pieces lo to hi - 1 of the chain. Several stages share the module, and
    parameters that several of them use. The one range (0, len(chain)) leaves the module as it is. holds: names of the
    parameters that are left, each by its first name in the whole model. team: the ranks along tp, each of which sends
    the next stage only its positions (tensor.positions). StageBoundaries are set here, before other strategies change
    the module. So those changes run only when the module does.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: LayerChain,
        ranges: Sequence[tuple[int, int]],
        *,
        team: dist.ProcessGroup | None = None,
    ) -> None:
        self.module, self.chain, self.ranges = module, chain, tuple(ranges)
        self._gates: StageBoundaries | None = None
        if self.ranges == ((0, len(chain)),):
            self.holds = set(homes(module))
            return
        _without_cache(module)
        self._gates = StageBoundaries(module, chain.blocks, chain.entries, chain.skipped, again=chain.recomputes)
        self._gates.team = team
        self.holds = set().union(*(chain.holds(lo, hi) for lo, hi in self.ranges))
        _drop(module, self.holds, self._gates.idle)
        list_absent(module)

    def runs(self, name: str) -> bool:
        """Return True if the module that the parameter or buffer `name` belongs to computes on this rank."""
        piece = self.chain.piece_of(name)
        return any(lo <= piece < hi for lo, hi in self.ranges)

    def forward(self, index: int, value: Any, received: Sequence[Tensor]) -> Any:
        """Run stage `index` of this rank.

        value: the input of the whole model (tensor, tuple or dict), which every stage gets. received: what the stage
        before returned, () for the first. Returns the tensors for the next stage as a tuple. The stage that ends the
        chain returns the model's output, whatever it is. Raises StrategyError if the model calls its blocks in another
        way than when the chain was found.
        """
        lo, hi = self.ranges[index]
        if self._gates is None:
            return call(self.module, value)
        return self._gates.run(lo, hi, received, lambda: call(self.module, value))

    def idle(self) -> bool:
        """Return True if a forward has not yet reached the stage's first block."""
        return self._gates is not None and self._gates.idle()

    def close(self) -> None:
        """Take the gates off the module."""
        if self._gates is not None:
            self._gates.remove()
            self._gates = None


def _without_cache(module: nn.Module) -> None:
    """Turn off the cache of HF models. It keeps keys and values of every block, for generating on one device."""
    for part in module.modules():
        if getattr(config := getattr(part, "config", None), "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def _drop(module: nn.Module, holds: set[str], idle: Callable[[], bool]) -> None:
    """Make every parameter that is not in `holds` absent."""
    for name, places in homes(module).items():
        if name in holds:
            continue
        param = places[0][0]._parameters[places[0][1]]
        replace_submodule(places, None)
        if param is not None:
            absent = Absent(param, name, idle)
            for part, attribute in places:
                vars(part)[attribute] = absent
                put_aliases(part, attribute, absent)
