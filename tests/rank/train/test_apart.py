"""Ranks that are interpreters of their own, as under torchrun: strings hash, and sets lie, otherwise in each."""

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
from ranks import run_ranks

from tests.rank.train.step.test_gradients import adamw, train_adamw

pytestmark = pytest.mark.usefixtures("known_to_be_right")

SCRIPT = """
import json, sys
sys.path[:0] = {folders!r}
from tests.rank.train.step.test_gradients import train_adamw
from tests.rank.train.switch.test_switch import trainer
said = [train_adamw(None)]
for strategy in sys.argv[1:]:
    job = trainer(strategy=strategy)
    job.fit(2)
    said.append([record["loss"] for record in job.history])
said.append([module for module in ("IPython", "ipyparallel", "ipykernel") if module in sys.modules])
print(json.dumps(said))
"""
TESTS = Path(__file__).resolve().parents[2]


def start(rank: int, size: int, port: int, strategies: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "PYTHONHASHSEED": rank + 1}
    env = {**os.environ, **{key: str(value) for key, value in place.items()}}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    script = SCRIPT.format(folders=[str(TESTS.parent), str(TESTS / "support")])
    command = [sys.executable, "-c", script, *strategies]
    return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True)


def alone(world: Any) -> list[float]:
    from tests.rank.train.switch.test_switch import trainer

    job = trainer()
    job.fit(2)
    return [record["loss"] for record in job.history]


STRATEGIES = ("tp", "cp=2")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """By rank: the losses of a plain training, those under each of STRATEGIES, and what is loaded of Jupyter."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [start(rank, 2, port, STRATEGIES, tmp_path_factory.mktemp("apart")) for rank in range(2)]
    return [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]


def test_what_is_summed_over_an_axis_is_in_the_same_order_everywhere(said: list[Any]) -> None:
    expected = run_ranks(alone, 1)[0]

    for _, *found, _ in said:
        for strategy, losses in zip(STRATEGIES, found, strict=True):
            assert (torch.tensor(losses) - torch.tensor(expected)).abs().max() <= 1e-10, strategy


def test_scripts_forked_ranks_and_one_process_lose_the_same(said: list[Any]) -> None:
    """The Trainer of a notebook cell and of an exported script must be the same training."""
    forked = run_ranks(train_adamw, 2)
    losses, _, _ = one_process(points(), steps=10, optimizer=adamw)

    assert [plain for plain, *_ in said] == forked
    assert [jupyter for *_, jupyter in said] == [[], []]
    assert forked[0] == pytest.approx(losses, rel=1e-5)


def evaluated(world: Any, strategies: Sequence[str]) -> list[float]:
    from tests.rank.train.switch.test_switch import trainer

    jobs = (trainer(strategy=strategy) for strategy in strategies)
    return [job.evaluate(job._stream.data[:11], batch_size=6) for job in jobs]


def test_evaluate_is_the_same_under_a_pipeline_and_every_other_strategy() -> None:
    strategies = ("dp=2 pp=2 schedule=zbv", "tp=2 cp=2")
    expected = run_ranks(evaluated, 1, ["ddp"])[0][0]
    for values in run_ranks(evaluated, 4, strategies, timeout=150):
        for strategy, value in zip(strategies, values, strict=True):
            assert abs(value - expected) <= 1e-10, strategy
