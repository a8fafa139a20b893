"""Test that in a script, a rank that waits too long reports its operation and ends its process."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from ranks import RankFailed, run_ranks

import nbkit
from nbkit.rank import torch_private
from nbkit.rank.train.replace import hang_watch
from nbkit.rank.world.flight_recorder import unfinished

pytestmark = pytest.mark.usefixtures("rows_are_known")


def hangs(world: Any, folder: str) -> int:
    """Let rank 1 do nothing after its second step until rank 0 has ended itself. Their output goes to files."""
    error = os.open(f"{folder}/{world.place.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(error, 2)

    def sleeps(trainer: Any, record: dict[str, Any]) -> None:
        if world.place.rank == 1 and record["step"] == 2:
            deadline = time.monotonic() + 60
            while not os.path.exists(f"{folder}/ended") and time.monotonic() < deadline:
                time.sleep(0.05)
            os._exit(3)

    trainer = quiet(progress=True, callbacks=[sleeps], recovery=nbkit.Recovery(hang_timeout=2.0))
    leave = os._exit

    def ended(status: int) -> None:
        open(f"{folder}/ended", "w").close()
        leave(status)

    hang_watch.os = type("os", (), {"_exit": staticmethod(ended)})  # type: ignore[assignment, attr-defined]
    trainer.fit(5)
    return 0


def test_a_rank_that_waits_too_long_names_its_operation_and_ends_the_run(tmp_path: Any, known_to_be_right: Any) -> None:
    with pytest.raises(RankFailed, match="the process ended without an answer"):
        run_ranks(hangs, 2, str(tmp_path), timeout=120)
    said = (tmp_path / "0").read_text()
    assert (tmp_path / "ended").exists()
    assert re.search(r"rank 0 has waited 2 s in all_reduce #\d+.* and ends this run", said), said
    assert "hang_timeout=3600" in said and "thread MainThread" in said
    assert "ends this run" not in (tmp_path / "1").read_text()


def waits_quietly() -> list[str]:
    said: list[str] = []
    with hang_watch.hang_watch(None, 0, ranks=2, replaceable=False, say=said.append):
        names = [thread.name for thread in threading.enumerate()]
    for seconds, ranks in ((float("inf"), 2), (0.1, 1)):
        with hang_watch.hang_watch(seconds, 0, ranks=ranks, replaceable=False, say=said.append):
            names += [f"{seconds}" for thread in threading.enumerate() if thread.name == "nbkit-hang-watch"]
    return [*said, str(names.count("nbkit-hang-watch")), *(name for name in names if name in ("inf", "0.1"))]


def test_the_default_timeout_in_a_script_is_ten_minutes_and_printed() -> None:
    assert waits_quietly() == [
        "A rank that waits 600 s for the others ends this run (hang_timeout= of nbkit.Recovery).",
        "1",
    ]


def one_is_late(world: Any) -> tuple[str, ...]:
    group = dist.new_group([0, 1], backend="gloo")
    torch_private.nccl_recorder = torch._C._distributed_c10d._dump_fr_trace_json
    dist.all_reduce(torch.ones(3), group=group)
    work = dist.all_reduce(torch.ones(7), group=group, async_op=True) if world.place.rank == 0 else None
    before = unfinished()
    dist.barrier()
    if world.place.rank == 1:
        dist.all_reduce(torch.ones(7), group=group)
    if work is not None:
        work.wait()
    return before


def test_the_flight_recorder_names_unfinished_collectives() -> None:
    """Read the record of gloo, which torch writes in the same form as that of NCCL."""
    late, other = run_ranks(one_is_late, 2)
    assert any(re.search(r"all_reduce #2 of group .*\(7,\): has not begun", one) for one in late), late
    assert not any("(7,)" in one for one in other)
