"""Test that tp splits nearly everything in usual models with random names, and sends what the textbook says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from nbkit.rank.comm.thread_group import ThreadGroup
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.plan import make_plan
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.proof.prove import prove
from nbkit.rank.parallel.whole_step import Batch, steps_of_ranks
from nbkit.strategy import Strategy
from tests.rank.parallel.tensor.test_data_flow import split_share
from verify.models import by_hand, images
from verify.models.renamed import renamed

PLAIN = renamed(by_hand, 5)[0].BY_HAND | renamed(images, 6)[0].IMAGES

GPTS = ("nanogpt", "nanogpt_by_hand", "nanogpt_checkpoint", "llama_by_hand")

IN_UNITS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""An all-reduce sends as much as an all-gather and a reduce-scatter together."""


def sgd(held: Any, plainly: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(held.values())}], lr=0.1)


@pytest.mark.long
@pytest.mark.parametrize("name", [*GPTS, "translator", "universal", "towers", "lstm", "mixer", "dit"])
def test_tp_splits_nearly_all_parameters_of_matmuls(name: str) -> None:
    specimen = PLAIN[name]
    model, (value, _) = specimen.build().train(), specimen.batch(2)
    plan = plan_of(model, 2, None, prove(model, lambda: call(model, value), [2]))

    # In a DiT, no map follows the modulating maps.
    lists = [path for path, part in model.named_modules() if type(part) is nn.Sequential and len(part) == 2]
    assert len(lists) == (3 if name == "dit" else 0)
    assert split_share(model, plan, [f"{path}.1" for path in lists]) >= 0.95 and not plan.unproven


def sent(name: str, blocks: int, seen: pytest.MonkeyPatch) -> Counter[str]:
    """Return the counts of operations of rank 0 of two in a step of the model with `blocks` blocks."""
    specimen, issued, collective = PLAIN[name], Counter[str](), ThreadGroup._collective
    model, batch = specimen.build().train(), specimen.batch(2)
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    del layers[blocks:]

    def counted(self: ThreadGroup, operation: str, *rest: Any) -> Any:
        issued[operation] += self.rank() == 0
        return collective(self, operation, *rest)

    seen.setattr(ThreadGroup, "_collective", counted)
    facts = ModelFacts(ModelShapes(skeleton_of(model)), proof=prove(model, lambda: call(model, batch[0]), [2]))
    steps_of_ranks(model, make_plan(Strategy(tp=2), facts), Batch(batch, 2, specimen.loss, None, sgd), None)
    seen.setattr(ThreadGroup, "_collective", collective)
    return issued


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in GPTS if "checkpoint" not in name])
def test_a_block_sends_two_all_reduces_in_forward_and_two_in_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, three = (sent(name, blocks, monkeypatch) for blocks in (2, 3))
    more = {operation: three[operation] - two[operation] for operation in two | three}

    assert sum(IN_UNITS[operation] * number for operation, number in more.items()) == 4 * IN_UNITS["all_reduce"], more
