"""Cache the last exchanges between two plans. An exchange depends only on the plans, so ranks need no messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn

from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.reshard.redistribute import ROUND_BYTES, Exchange
from nbkit.tensor_layout import Layout

Kinds = dict[str, torch.dtype]
"""Key of a tensor (see job_state) -> dtype, for all tensors of the job."""

KEPT = 8


class ExchangeCache:
    """The exchanges of a job, as `rank` carries them out. Can be used from any thread. skeleton: the model's."""

    def __init__(self, skeleton: nn.Module, rank: int) -> None:
        self.rank = rank
        kept = skeleton.state_dict().keys()
        self._kinds: Kinds = {f"weight/{name}": p.dtype for name, p in skeleton.named_parameters()}
        self._kinds |= {f"buffer/{name}": each.dtype for name, each in skeleton.named_buffers() if name in kept}
        self._kept: OrderedDict[tuple[ParallelPlan, ParallelPlan], tuple[Kinds, ExchangePlan, Exchange | None]]
        self._kept = OrderedDict()

    def kinds(self, memory: Mapping[str, Mapping[str, torch.dtype]]) -> Kinds:
        """Return the dtype of every tensor of the job.

        memory: name of a parameter -> {key: dtype} of its optimizer state per element.
        """
        return self._kinds | {f"{key}/{name}": dtype for name, kinds in memory.items() for key, dtype in kinds.items()}

    def exchange(self, old: ParallelPlan, new: ParallelPlan, kinds: Kinds, *, limit: int = ROUND_BYTES) -> Exchange:
        """Return the exchange from `old` to `new`, in rounds of `limit` bytes.

        Raises TrainingError as `ExchangePlan.of` does.
        """
        plan, exchange = self._known(old, new, kinds)
        if exchange is None or exchange.limit != limit:
            exchange = Exchange(plan, self.rank, limit=limit)
            self._keep(old, new, kinds, plan, exchange)
        return exchange

    def plan(self, old: ParallelPlan, new: ParallelPlan, kinds: Kinds) -> ExchangePlan:
        """Return the plan of the exchange from `old` to `new`, which is not cut into rounds. Raises as `exchange`."""
        return self._known(old, new, kinds)[0]

    def _known(self, old: ParallelPlan, new: ParallelPlan, kinds: Kinds) -> tuple[ExchangePlan, Exchange | None]:
        known, plan, exchange = self._kept.get((old, new), (None, None, None))
        if plan is not None and known == kinds:
            return plan, exchange
        plan = ExchangePlan.of(
            self.layouts_by_rank(old, kinds),
            self.layouts_by_rank(new, kinds),
            {key: dtype.itemsize for key, dtype in kinds.items()},
            node_of=new.node_of,
        )
        self._keep(old, new, kinds, plan, None)
        return plan, None

    def _keep(
        self, old: ParallelPlan, new: ParallelPlan, kinds: Kinds, plan: ExchangePlan, exchange: Exchange | None
    ) -> None:
        self._kept[old, new] = kinds, plan, exchange
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def layouts_by_rank(self, plan: ParallelPlan, kinds: Kinds) -> list[dict[str, Layout]]:
        """Return, for each rank, key -> layout."""
        states = [(key, kind, name) for key in kinds for kind, _, name in [key.partition("/")]]
        states = [each for each in states if each[1] not in ("weight", "buffer")]
        layouts = plan.layouts
        return [
            {f"weight/{name}": layout for name, layout in weights.items()}
            | {f"buffer/{name}": layout for name, layout in buffers.items()}
            | {key: held[name] for key, _, name in states if name in held}
            for weights, held, buffers in zip(layouts.weights, layouts.held, layouts.buffers, strict=True)
        ]
