"""Brings ranks to agree around a switch: they fail alike, and they carry out the same exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nbkit.errors import SwitchError
from nbkit.rank.comm.agree import largest
from nbkit.rank.comm.all_gather_objects import all_gather_objects
from nbkit.rank.parallel.reshard.redistribute import Exchange, plan_collectively
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.switch.plan_cache import Kinds, PlanCache
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass
class Said:
    """What a rank says when something was done. doing: what it is doing, for the error. numbers: compared by all.

    largest: of each of the numbers over all ranks, known afterwards.
    """

    doing: str
    numbers: list[int]
    largest: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Consensus:
    """Of all ranks about a switch. goes_on: the strategy that stays in force when the switch fails."""

    goes_on: Strategy
    world_size: int
    device: torch.device

    def gather(self, own: Any, doing: str, failure: Exception | None = None) -> list[Any]:
        """What every rank has, by rank. Collective. Raises SwitchError, on every rank, when one had a failure."""
        everyone = all_gather_objects((_spoken(failure), own), world_size=self.world_size, device=self.device)
        self._check(doing, [spoken for spoken, _ in everyone], failure)
        return [each for _, each in everyone]

    @contextmanager
    def all_or_none(self, doing: str, *, numbers: int = 0) -> Iterator[Said]:
        """What is done inside has worked on every rank, or SwitchError is raised on every rank.

        numbers: so many are compared, zeros if nothing else. Collective: one small all-reduce; waits for the device.
        """
        said, failure = Said(doing, [0] * numbers), None
        try:
            yield said
        except Exception as error:
            failure = error
        failed, *said.largest = largest([int(failure is not None), *said.numbers], device=self.device)
        if failed:
            own = _spoken(failure), said.doing
            everyone = all_gather_objects(own, world_size=self.world_size, device=self.device)
            done = next((doing for spoken, doing in everyone if spoken), doing)
            self._check(done, [spoken for spoken, _ in everyone], failure)

    def _check(self, doing: str, spoken: Sequence[str], own: Exception | None) -> None:
        if failed := [(rank, text) for rank, text in enumerate(spoken) if text]:
            raise SwitchError(
                f"The switch failed while {doing}; {self.goes_on} goes on, unchanged.",
                numbers="; ".join(f"rank {rank}: {text}" for rank, text in failed[:2]) + "; ..." * (len(failed) > 2),
                hint="%strategy shows what can be picked",
            ) from own


def planned(
    plans: PlanCache, kinds: Kinds, old: Strategy, new: Strategy, before: JobState, target: JobState
) -> tuple[Exchange, list[int]]:
    """The exchange from `before` to `target` as this rank sees it, and what the ranks compare: see `agreed`."""
    exchange = plans.exchange(old, new, kinds)
    plan, rank = exchange.plan, plans.rank
    fits = _fits(before, plan.old[rank], kinds) and _fits(target, plan.new[rank], kinds)
    return exchange, [int(not fits), exchange.stamp, -exchange.stamp]


def agreed(exchange: Exchange, compared: Sequence[int], before: JobState, target: JobState, *, rank: int) -> Exchange:
    """The exchange, the same on every rank. compared: of what `planned` gave the largest over all ranks.

    Collective where a rank holds something else than its strategy says: then all layouts are gathered.
    """
    different, most, least = compared
    if not different and most == -least:
        return exchange
    return Exchange(plan_collectively(before, {key: layout for key, (_, layout) in target.items()}), rank)


def _fits(held: JobState, planned: Mapping[str, Layout], kinds: Kinds) -> bool:
    """Whether a rank holds what its strategy says."""
    return held.keys() == planned.keys() and all(
        layout == planned[key] and tensor.dtype == kinds[key] for key, (tensor, layout) in held.items()
    )


def _spoken(failure: Exception | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]
