"""Test a program that listens: what a notebook sees of it, live cells between its steps, and refused access."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import planted_hangs
import pytest
from fake_run import FakeRun
from ranks import RankFailed, run_ranks

from nbkit import job_folder
from nbkit.commands import main
from nbkit.errors import CellError, ClusterError, ClusterNotFound, UsageError
from nbkit.job_folder import ListeningRank
from nbkit.notebook.cluster.job import AttachedJob, JobLink
from nbkit.notebook.run.reader import read_run
from nbkit.rank.listen import LONGEST, launch_of, place
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.messages import GetJobState, PlanJobCell, SayHello, encoded
from nbkit.wire.processes import Process, node_name

DDP = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter
plan, stop = {}, pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
log = SummaryWriter(sys.argv[1] + ".board")
def step(x):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.add_scalar("train/loss", loss.item())
while not plan.get("end"):
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=8):
        step(x)
        time.sleep(0.005)
        if plan.get("hang") and dist.get_rank() == 1:
            while not stop.exists():
                time.sleep(0.02)  # here
        if plan.get("end"):
            break
dist.destroy_process_group()
"""


def as_rank(rank: int, n: int, port: int, home: str, arguments: list[str]) -> int:
    """Run a rank as a launcher starts it with `nbkit run ...`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NBKIT_HOME": home}
    return main(["run", *arguments])


@contextlib.contextmanager
def listening(n: int, *arguments: str) -> Iterator[Future[list[int]]]:
    """Run a program on n ranks during the block. After it, end the ranks that still run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            run_ranks, as_rank, n, n, port, os.environ["NBKIT_HOME"], list(arguments), join=False, timeout=400
        )
        try:
            yield future
        finally:
            while not future.done():  # ranks that do not listen yet are ended when they do
                _end_ranks()
                time.sleep(0.1)
            with contextlib.suppress(RankFailed):
                future.result()


def _end_ranks() -> None:
    for name in job_folder.names():
        for rank in job_folder.ranks_in(job_folder.folder_of(name)).values():
            rank.process.end(signal.SIGKILL)


def until(found: Callable[[], Any], running: Future[Any], seconds: float = 90.0) -> Any:
    """Return the result of `found` as soon as it is true. Fail if the ranks end before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if running.done():
            running.result()
        if value := found():
            return value
        time.sleep(0.05)
    pytest.fail("it did not come in time")


def attached(n: int) -> AttachedJob | None:
    with contextlib.suppress(ClusterNotFound):
        job = AttachedJob.attach()
        return job if len(job.ranks) == n else None
    return None


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def audit(job: AttachedJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "audit.jsonl").read_text().splitlines()]


def refused(job: AttachedJob, said: str) -> bool:
    return any(said in entry.get("refused", "") for entry in audit(job))


def connected(rank: ListeningRank) -> tuple[socket.socket, str]:
    sock = socket.create_connection(("127.0.0.1", rank.port), timeout=10)
    return sock, sock.recv(100).decode().strip()


def test_a_plain_program_can_be_observed_runs_cells_and_refuses_strangers(tmp_path: Path) -> None:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(DDP)
    with listening(2, str(script), str(stop)) as running:
        job = until(lambda: attached(2), running, seconds=300)
        assert re.fullmatch("train-[0-9a-f]{4}", job.name)

        # The picture has the parts of its steps on both ranks, traffic, memory, and the loss that it logs.
        picture = until(lambda: (found := job.picture()).get("memory") and found["missing"] == [] and found, running)
        for _, seconds, *parts in picture["ranks"]:
            assert sum(parts) == pytest.approx(seconds, rel=0.05)
        row = dict(zip(("compute", "exposed", "waiting", "bubble", "data", "optimizer", "other"), parts, strict=True))
        assert min(row["compute"], row["exposed"], row["data"], row["optimizer"]) > 0 == row["bubble"]
        (row,) = (row for row in picture["table"] if row["op"] == "all_reduce")  # DDP also broadcasts in step 2
        assert (row["axis"], row["bytes"]) == ("world", 2 * 4 * (32 * 32 + 32))
        assert picture["memory"][0]["at_rest"] == 4 * 4 * (32 * 32 + 32)  # weights, gradients, two moments
        assert all(state["loss"] > 0 and state["lr"] == 0.01 for state in job.state().values())
        assert all(text in repr(job) for text in (job.name, "of the step", "MiB"))

        # Live cells run after the same step on both ranks, so their collectives meet. Errors do not end the program.
        cell = job.run(
            "optimizer.param_groups[0]['lr'] = 0.5\nkept = torch.ones(1)\ndist.all_reduce(kept)\nkept.item()"
        )
        assert cell.values == {0: "2.0", 1: "2.0"}
        assert job.run("print(type(x).__name__, kept.item())").output == {0: "Tensor 2.0\n", 1: "Tensor 2.0\n"}
        assert {state["lr"] for state in job.state().values()} == {0.5}
        with pytest.raises(CellError, match="Rank 1 failed: ZeroDivisionError") as failed:
            job.run("1 / (1 - rank)")
        assert "<live cell>" in failed.value.traceback and failed.value.ranks == (1,)
        with pytest.raises(UsageError, match="SyntaxError"):
            job.run("1 +")

        # Each misuse is refused, and written to the log.
        rank = job.ranks[0]
        sock, nonce = connected(rank)
        with sock:
            SignedLink(sock, key_of("0" * 64, nonce), opened=True).send(PlanJobCell("import os; os._exit(1)", 10**9))
            assert sock.recv(100) == b""
        until(lambda: refused(job, "not signed"), running)
        key, sent = job_folder.secret_of(job.folder), []
        sock, nonce = connected(rank)
        with sock:
            link = SignedLink(sock, key_of(key, nonce), opened=True)
            sent.append(link._packed(json.dumps(encoded(GetJobState())).encode()) + b"\n")
            sock.sendall(sent[0])
            assert sock.recv(4096)
            sock.sendall(sent[0])  # the same message again
            assert sock.recv(100) == b""
        sock, _ = connected(rank)
        with sock:  # on another connection
            sock.sendall(sent[0])
            assert sock.recv(100) == b""
        until(lambda: sum("not signed" in entry.get("refused", "") for entry in audit(job)) == 3, running)
        sock, _ = connected(rank)
        with sock, contextlib.suppress(OSError):
            sock.sendall(b"x" * (LONGEST + 100_000))
        until(lambda: refused(job, "more than 1,048,576 bytes"), running)
        link_of_job = JobLink(rank, key, seconds=5)
        with pytest.raises(UsageError, match="does not answer SayHello"):
            link_of_job.ask(SayHello(), seconds=5)  # type: ignore[arg-type]
        link_of_job.ask(PlanJobCell("plan.update(end=True)", 10**6), seconds=5)
        link_of_job.close()  # a planned cell without a decision is withdrawn
        until(lambda: job.run("plan.get('end')").values == {0: "", 1: ""}, running)

        # A rank for which the others wait is named, with its line.
        job.run("plan['hang'] = True")
        line = next(number for number, text in enumerate(DDP.splitlines(), 1) if text.endswith("# here"))
        named = f"rank 1 is in time.sleep, train.py line {line}"  # the program sleeps in other lines, too
        why = until(lambda: named in (found := job.why()).sentence and found.verdict.ranks == (1,) and found, running)
        assert re.search(r"Rank 0 waits in all_reduce #\d+ on world .*\(train.py line \d+\)", why.sentence)
        assert why.verdict.stuck
        assert "thread MainThread" in str(job.why(stacks=True)).replace("thread nbkit-listen", "")

        stop.touch()
        job.run("plan['end'] = True", timeout=30)
        assert running.result() == [0, 0]
    told = audit(job)
    assert any(entry.get("source") == "plan['end'] = True" for entry in told)
    assert {"ran", "done", "withdrawn"} <= {entry.get("outcome") for entry in told} | {"withdrawn"}
    assert os.stat(job.folder).st_mode & 0o777 == 0o700
    assert {os.stat(job.folder / name).st_mode & 0o777 for name in ("token", "audit.jsonl", "rank0.json")} == {0o600}
    assert [(each.name, each.state) for each in AttachedJob.list()] == [(job.name, "ended")]
    with pytest.raises(ClusterNotFound, match="listens"):
        AttachedJob.attach(job.name)


def a_rank(name: str, **changes: Any) -> Path:
    folder = job_folder.make(name)
    job_folder.made_secret(folder)
    values = dict(rank=0, world_size=2, host=node_name(), process=Process.of(os.getpid()), port=1, launch="a")
    job_folder.save(folder, ListeningRank(**values | {"program": "t.py", "begun": 1.0, "cells": True} | changes))
    return folder


@pytest.mark.parametrize(("file", "mode"), [("token", 0o640), ("rank0.json", 0o604), (".", 0o750)])
def test_files_that_other_users_may_use_are_refused_on_both_sides(file: str, mode: int) -> None:
    folder = a_rank("train")
    (folder / file).chmod(mode)
    with pytest.raises(ClusterError, match="Other users may use this file") as refusal:
        AttachedJob.attach("train")
    assert f"mode {mode:o}" in refusal.value.numbers and refusal.value.hint.startswith("chmod")
    if file != "rank0.json":
        with pytest.raises(ClusterError, match="Other users may use"):
            job_folder.made_secret(job_folder.make("train"))


def test_a_file_of_another_user_or_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_rank("train")
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(ClusterError, match=r"not yours(?s:.*)belongs to user"):
        AttachedJob.attach("train")
    monkeypatch.undo()
    (tmp_path / "elsewhere").write_text("secret")
    (folder / "token").unlink()
    (folder / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError, match="is a link"):
        job_folder.secret_of(folder)


def test_a_job_is_found_by_the_start_of_its_name_only_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0 and "nbkit run -n 2 train.py" in capsys.readouterr().out
    for name in ("train-a", "train-b"):
        a_rank(name)
    a_rank("other", process=Process(os.getpid(), 1.0, "a boot long ago"))
    with pytest.raises(UsageError, match=r"train-a, train-b"):
        AttachedJob.attach("train")
    assert AttachedJob.attach("train-b").name == "train-b"
    with pytest.raises(ClusterNotFound, match="other"):
        AttachedJob.attach("other")
    assert main(["jobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(line.split()[0], line.split()[2]) for line in lines[1:]] == [
        ("other", "ended"), ("train-a", "1"), ("train-b", "1"),
    ]  # fmt: skip
    assert main(["clean"]) == 0 and job_folder.names() == ["train-a", "train-b"]


def test_watch_takes_the_start_of_the_name_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(a_rank("train-a") / "run", 1, "dp=1")
    run.step()
    run.close()
    for name in ("train-a", "train"):
        assert main(["watch", name, "--once"]) == 0
        assert "step 1" in capsys.readouterr().out


def test_missing_ranks_are_reported_and_no_cell_runs_without_them() -> None:
    a_rank("train")
    job = AttachedJob.attach("train")
    why = job.why()  # no process listens at port 1
    assert [state.kind for state in why.states.values()] == ["native", "silent"]
    with pytest.raises(ClusterError, match="1 of 2 ranks"):
        job.run("1")


def test_ranks_of_an_earlier_start_do_not_count() -> None:
    a_rank("train")
    folder = a_rank("train", rank=1, launch="b", begun=2.0)
    assert list(job_folder.ranks_in(folder)) == [1]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (3, 4, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({"SLURM_NTASKS": "8"}, (0, 1, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 1)),
    ],
)
def test_the_rank_comes_from_the_launchers_variables(variables: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert place(variables) == expected


def test_all_ranks_of_a_start_have_one_launch_id_and_other_starts_differ() -> None:
    start = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    assert launch_of(start) == launch_of({**start, "RANK": "1"}) != launch_of({**start, "MASTER_PORT": "2"})


def test_a_missing_program_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no/such.py", "--lr", "1"]) == 2
    assert "There is no such program" in capsys.readouterr().err


RUN = ["nbkit", "run", "--job", "mine"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["torchrun", "--nproc-per-node", "2"], ["torchrun", "--nproc-per-node", "2", "-m", *RUN]),
        (["accelerate", "launch"], ["accelerate", "launch", "-m", *RUN]),
        (["srun", "-n", "2", "python3", "-u"], ["srun", "-n", "2", "python3", "-u", "-m", *RUN]),
        (["srun", "-n", "2"], ["srun", "-n", "2", sys.executable, "-m", *RUN]),
        (["srun", "-N", "2", "torchrun"], ["srun", "-N", "2", "torchrun", "-m", *RUN]),
        (["srun", "deepspeed"], ["srun", "deepspeed", "--module", *RUN]),
        (["deepspeed", "--num_gpus", "2"], ["deepspeed", "--num_gpus", "2", "--module", *RUN]),
    ],
)
def test_run_before_a_launcher_is_inserted_before_the_script(
    before: list[str], after: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda found, command: started.append((found, command)))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == before[0] else None)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(0)")

    with contextlib.suppress(UsageError):
        main(["run", "--job", "mine", *before, str(script), "--lr", "1"])

    assert started == [(f"/bin/{before[0]}", [*after, str(script), "--lr", "1"])]


def test_deepspeeds_local_rank_reaches_the_script_as_its_first_argument(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "nbkit", "--local_rank=1", "run", str(script), "--lr", "1"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.stdout.strip() == "['--local_rank=1', '--lr', '1']", done.stderr


def states_in_a_closure(rank: int, home: str) -> list[str]:
    import torch

    from nbkit.rank import listen
    from nbkit.rank.telemetry.phases import clock

    os.environ["NBKIT_HOME"] = home
    listen.listen("closure")
    weight, states = torch.nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> torch.Tensor:
        states.append(clock.state)
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        optimizer.step(closure=closure)
    return states


def test_time_in_an_optimizer_closure_is_not_optimizer_time(tmp_path: Path) -> None:
    (states,) = run_ranks(states_in_a_closure, 1, str(tmp_path), join=False)

    assert states[1:] == ["forward"] * 3  # the first step is not recorded


LATE = 0.3


def waits_of_ddp(rank: int, port: int, home: str, unused: bool) -> list[float]:
    import torch
    import torch.distributed as dist

    from nbkit.rank import listen
    from nbkit.rank.comm.gloo import interruptible_wait
    from nbkit.rank.telemetry.phases import clock

    os.environ |= {"NBKIT_HOME": home, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    listen.listen("waits")
    interruptible_wait._Gate = None  # type: ignore[misc, assignment]  # nothing ends the waits of a listening program
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    made: list[dict[str, float]] = []

    def note(step: Any) -> None:
        times: dict[str, float] = {}
        for state, start, stop in step.intervals():
            assert start <= stop
            times[state] = times.get(state, 0.0) + (stop - start) / 1e9
        made.append(times)

    clock.listeners.append(note)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.ones(4, 8)).sum()
        time.sleep(LATE * rank)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return [step.get("wait world", 0.0) for step in made[1:]]


@pytest.mark.parametrize("unused", [False, True])
def test_ddp_waits_for_a_late_rank_with_find_unused_parameters_too(unused: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    waits, _ = run_ranks(waits_of_ddp, 2, port, str(tmp_path), unused, join=False)

    assert len(waits) == 2 and min(waits) >= 0.9 * LATE  # rank 1 sleeps LATE seconds while rank 0 waits


# --- Long -------------------------------------------------------------------------------------------------------------

HEAD = """import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
time.sleep(1)  # until the others have formed it too: rank 0 serves their store
rank = dist.get_rank()
"""
# In a script, a rank that skipped a collective may still come to it. In a cell it has ended, so the skip is certain.
ENDED = re.compile("ended (its|their) cell|is dead|Trainer|split model|left out")
HANGS = [
    hang
    for hang in planted_hangs.HANGS
    if not any(map(ENDED.search, (*hang.words, hang.name))) and "nbkit." not in hang.source
]


@pytest.mark.long
@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.name)
def test_hangs_of_a_program_are_explained(hang: planted_hangs.Hang, tmp_path: Path) -> None:
    """Run the planted hangs of cells in a script. Its ranks dump no stack, so native code has no line."""
    script = tmp_path / "hang.py"
    first = HEAD + planted_hangs.PRELUDE
    script.write_text(first + hang.source + "time.sleep(1000)\n")
    lines = script.read_text().splitlines()
    marks = {mark: next((i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")), 0)
             for mark in ("here", "there", "before", "reads")}  # fmt: skip
    words = [re.sub(r"cell \{\w+\} line", "hang.py line", text).format(**marks) for text in hang.words]
    if "interpreter" in hang.name:
        words = [text for text in words if "line" not in text] + ["rank 3 is in native code"]
    with listening(4, str(script)) as running:
        job = until(lambda: attached(4), running, seconds=300)

        def explained() -> bool:
            why = job.why()
            return why.verdict.ranks == hang.ranks and all(text in why.sentence for text in words)

        try:
            until(explained, running, seconds=40)
        except pytest.fail.Exception:
            pytest.fail(f"{words} {hang.ranks}: {job.why()}")


PROGRAMS = Path(__file__).parents[1] / "programs"
TAKES = {"lightning_fit": ("lightning", "torchmetrics"), "fabric_loop": ("lightning",), "metrics": ("torchmetrics",)}
STEPS = {"metrics": 14, "hf_trainer": 6, "nanogpt": 6, "fsdp2_dcp": 7, "accelerate_loop": 8}


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
BIN = Path(sys.executable).parent
LAUNCHERS: dict[str, tuple[Any, ...]] = {  # under Slurm: tests/machines/test_slurm.py
    "torchrun": (BIN / "torchrun", "--nproc-per-node", "2", "--standalone"),
    "accelerate": (BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", "2"),  # the program uses the CPU
    "deepspeed": (BIN / "deepspeed", "--num_gpus", "2", "--no_local_rank"),
}


def launched(program: Path, losses: Path, *before: str, command: Sequence[Any] = TORCHRUN) -> list[float]:
    command = [*command, *before]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, program, "--losses", losses], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(ast.literal_eval(losses.read_text()))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_listening_programs_compute_the_same_and_their_steps_are_recorded(name: str, tmp_path: Path) -> None:
    for library in TAKES.get(name, ()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    program = PROGRAMS / f"{name}.py"
    expected = launched(program, tmp_path / "expected")

    assert launched(program, tmp_path / "listening", "-m", "nbkit", "run") == expected

    (job,) = AttachedJob.list()
    assert (job.ranks, job.state) == (2, "ended")
    picture = read_run(job.folder).picture()
    assert len(picture["ranks"]) == 2 and picture["table"]
    steps = [point[0] for point in read_run(job.folder).snapshot()["points"]]
    assert steps == list(range(2, STEPS.get(name, len(steps) + 1) + 1))


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_started_by_nbkit_run_has_ranks_that_listen(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not LAUNCHERS[launcher][0].exists():
        pytest.skip(f"{launcher} is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    program = PROGRAMS / "accelerate_loop.py"
    expected = launched(program, tmp_path / "expected", command=LAUNCHERS[launcher])

    begin = (sys.executable, "-m", "nbkit", "run")
    assert launched(program, tmp_path / "listening", command=(*begin, *LAUNCHERS[launcher])) == expected

    (job,) = AttachedJob.list()
    assert (job.ranks, job.state) == (2, "ended")
    assert len(read_run(job.folder).picture()["ranks"]) == 2
