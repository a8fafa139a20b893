"""After a training was broken off in mid-step, ranks may differ by a step: here they become one again, or say so.

An interrupt reaches each rank where it stands: one has updated its weights, another has not. The next training begins
by comparing; only when something was broken off is anything moved, from the rank that came furthest with whole weights.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.rank.parallel.replicate import broadcast

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["become_one"]


def become_one(job: Job) -> None:
    """Compare how far the ranks are; level them if a step was broken off. Collective.

    Raises TrainingError when every rank was interrupted within a step, so that no weights are whole.
    """
    if job.world_size == 1:
        everyone = [[job.step, job.broken_off, job.half_way]]
    else:
        mine = torch.tensor([job.step, job.broken_off, job.half_way], dtype=torch.int64, device=job.device)
        gathered = [torch.empty_like(mine) for _ in range(job.world_size)]
        dist.all_gather(gathered, mine)
        everyone = [one.tolist() for one in gathered]
    steps = [step for step, _, _ in everyone]
    if len(set(steps)) == 1 and not any(broken or half for _, broken, half in everyone):
        return
    whole = [rank for rank, (_, _, half) in enumerate(everyone) if not half]
    if not whole:
        raise TrainingError(
            "Every rank was interrupted within a step: no rank has whole weights.",
            numbers=f"finished steps: {', '.join(map(str, steps))}",
            hint="trainer.load(path) of a checkpoint, or build the Trainer again",
        )
    source = max(whole, key=lambda rank: (steps[rank], -rank))
    if job.world_size > 1:
        broadcast(job.model, src=source)
        _carry(job, source)
    job.whole_again()
    if len(set(steps)) > 1 and job.rank == 0:
        warnings.warn(
            f"the last training was broken off in mid-step: finished steps of ranks 0-{len(steps) - 1} were "
            f"{', '.join(map(str, steps))}; all go on from rank {source}'s step {steps[source]}",
            stacklevel=2,
        )


def _carry(job: Job, source: int) -> None:
    """Optimizer, step, history and position of `source`, to every rank. Through the CPU: rare, and any state fits."""
    held: list[Any] = [None]
    if job.rank == source:
        file = io.BytesIO()
        state = {
            "optimizer": job.optimizer.state_dict(),
            "step": job.step,
            "history": list(job.ledger.records),
            "position": job.feed.position(),
        }
        torch.save(state, file)
        held = [file.getvalue()]
    dist.broadcast_object_list(held, src=source, device=job.device)
    if job.rank != source:
        state = torch.load(io.BytesIO(held[0]), map_location=job.device, weights_only=True)
        job.optimizer.load_state_dict(state["optimizer"])
        job.step = state["step"]
        job.ledger.records[:] = state["history"]
        job.feed.go_to(state["position"])
