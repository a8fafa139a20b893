"""Test ranks that are separate interpreters, as under torchrun, with different string hashes and orders of sets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import one_process, points
from ranks import know_links, know_optimizers, run_ranks

from tests.rank.train.step.test_gradients import adamw, train_adamw
from tests.rank.train.switch.test_switch import losses, trainer

pytestmark = pytest.mark.usefixtures("rows_are_known")

SCRIPT = """
import json, sys
sys.path[:0] = {folders!r}
from tests.rank.train.test_apart import trained
print(json.dumps(trained({rank}, {port}, {strategies!r})))
"""
TESTS = Path(__file__).resolve().parents[2]


def trained(rank: int, port: int, strategies: Sequence[str]) -> list[Any]:
    """Return the losses of a plain training and under each strategy, and the loaded Jupyter modules."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    know_links(2)
    know_optimizers()
    said: list[Any] = [train_adamw(None)]
    for strategy in strategies:
        job = trainer(strategy=strategy)
        job.fit(2)
        said.append(losses(job))
    return [*said, [module for module in ("IPython", "ipyparallel", "ipykernel") if module in sys.modules]]


def alone(world: Any) -> list[float]:
    job = trainer()
    job.fit(2)
    return losses(job)


STRATEGIES = ("tp", "cp=2")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return `trained` of a forked rank, and of an interpreter with different string hashes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folders = [str(TESTS.parent), str(TESTS / "support")]
    script = SCRIPT.format(folders=folders, rank=1, port=port, strategies=STRATEGIES)
    env = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"env": env, "cwd": tmp_path_factory.mktemp("apart"), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **how) as other:
        (first,) = run_ranks(trained, 1, port, STRATEGIES, join=False, timeout=120)
        return [first, json.loads(other.communicate(timeout=120)[0].splitlines()[-1])]


@pytest.mark.long
def test_sums_over_an_axis_have_the_same_order_on_all_ranks(said: list[Any]) -> None:
    expected = run_ranks(alone, 1)[0]

    for _, *found, _ in said:
        for strategy, curve in zip(STRATEGIES, found, strict=True):
            assert (torch.tensor(curve) - torch.tensor(expected)).abs().max() <= 1e-10, strategy


@pytest.mark.long
def test_scripts_forked_ranks_and_one_process_have_the_same_losses(said: list[Any]) -> None:
    """Check that a Trainer in a notebook cell and in an exported script trains the same."""
    forked = run_ranks(train_adamw, 2)
    expected, _, _ = one_process(points(), steps=10, optimizer=adamw)

    assert [plain for plain, *_ in said] == forked
    assert said[1][-1] == []
    assert forked[0] == pytest.approx(expected, rel=1e-5)


def evaluated(world: Any, strategies: Sequence[str]) -> list[float]:
    jobs = (trainer(strategy=strategy) for strategy in strategies)
    return [job.evaluate(job._stream.data[:11], batch_size=6) for job in jobs]


@pytest.mark.long
def test_evaluate_is_the_same_under_a_pipeline_and_every_other_strategy() -> None:
    strategies = ("dp=2 pp=2 schedule=zbv", "tp=2 cp=2")
    expected = run_ranks(evaluated, 1, ["ddp"])[0][0]
    for values in run_ranks(evaluated, 4, strategies, timeout=150):
        for strategy, value in zip(strategies, values, strict=True):
            assert abs(value - expected) <= 1e-10, strategy
