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

import torch
from ranks import run_ranks

SCRIPT = """
import json, sys
sys.path[:0] = {folders!r}
from tests.rank.train.switch.test_switch import trainer
for strategy in sys.argv[1:]:
    job = trainer(strategy=strategy)
    job.fit(4)
    print(json.dumps([record["loss"] for record in job.history]))
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
    job.fit(4)
    return [record["loss"] for record in job.history]


def test_what_is_summed_over_an_axis_is_in_the_same_order_everywhere(tmp_path: Path) -> None:
    strategies = ("tp", "cp=2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [start(rank, 2, port, strategies, tmp_path) for rank in range(2)]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    expected = run_ranks(alone, 1)[0]

    for text in said:
        for strategy, line in zip(strategies, text.splitlines()[-len(strategies) :], strict=True):
            losses = torch.tensor(json.loads(line))
            assert (losses - torch.tensor(expected)).abs().max() <= 1e-10, strategy


def evaluated(world: Any, strategies: Sequence[str]) -> list[float]:
    from tests.rank.train.switch.test_switch import trainer

    jobs = (trainer(strategy=strategy) for strategy in strategies)
    return [job.evaluate(job._stream.data[:11], batch_size=6) for job in jobs]


def test_evaluate_is_the_same_under_a_pipeline_and_every_other_strategy() -> None:
    strategies = ("pp microbatches=4", "dp=2 pp=2 schedule=zbv", "zero3", "tp=2 cp=2")
    expected = run_ranks(evaluated, 1, ["ddp"])[0][0]
    for values in run_ranks(evaluated, 4, strategies, timeout=150):
        for strategy, value in zip(strategies, values, strict=True):
            assert abs(value - expected) <= 1e-10, strategy
