"""What a switch needs and can be made beside the training, from the moment it is asked for until all ranks have it.

In a thread of this rank: who holds what under the new strategy, the plan of the exchange, the module cut (where the
groups are there from an earlier visit). It sends nothing, takes no memory for weights and draws no random numbers.
Nothing hangs on it: a switch makes what it does not find, and finds only what is still true.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import torch

from nbkit.errors import NbkitError
from nbkit.rank.train import holdings
from nbkit.rank.train.foresight import settled
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["begin", "make_ready"]


def begin(job: Job | None, text: str | None) -> threading.Event:
    """Make ready for a switch of `job` to `text`, in a thread. The event is set when that has ended, however it did."""
    ended = threading.Event()
    if job is None or text is None:
        ended.set()
        return ended

    def run() -> None:
        try:
            make_ready(job, text)
        except NbkitError:
            pass  # the switch will say so, to whom it concerns
        except Exception as error:
            # The training may have changed what was looked at; whatever it was, the switch does it again.
            print(f"nothing made ready for {text}: {type(error).__name__}: {error}", file=sys.__stderr__)
        finally:
            ended.set()

    threading.Thread(target=run, name="nbkit-ahead", daemon=True).start()
    return ended


def make_ready(job: Job, text: str) -> None:
    """What `begin` does. Raises StrategyError for a strategy that does not fit. Not collective."""
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)  # a thread begins with the first one
    blueprint = job.blueprint
    new = settled(job, Strategy.parse(text, job.world_size))
    blueprint.make_ready(job.strategy, new, blueprint.plans.kinds(_expected(job)))


def _expected(job: Job) -> dict[str, dict[str, torch.dtype]]:
    """name -> {key: dtype} of what the optimizers of all ranks keep, as far as this rank can tell."""
    own: dict[str, dict[str, torch.dtype]] = {}
    for key, (tensor, _) in holdings.per_element(job.side, job.optimizer.inner).items():
        kind, _, name = key.partition("/")
        own.setdefault(name, {})[kind] = tensor.dtype
    # Of the parameters that others hold, what is kept of those here.
    usual = next(iter(own.values()), {})
    trained = [name for name, p in job.blueprint.skeleton.named_parameters() if p.requires_grad]
    return {name: usual for name in trained if name not in job.side.held} | own
