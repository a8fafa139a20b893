"""Cells on real ranks: what they see, what comes back, and what a failing one leaves."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from waiting import until

from nbkit import Cluster
from nbkit.errors import CellError, CellRunning, ClusterExists, UsageError
from nbkit.notebook.cluster.cells import client


def plain(text: str) -> str:
    """Return the text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_engine_ids_are_ranks_and_every_rank_is_pinned(four: Cluster) -> None:
    values = four.run("import os; (rank, local_rank, world_size, sorted(os.sched_getaffinity(0)))").values
    cores = sorted(os.sched_getaffinity(0))
    assert [values[r][:3] for r in range(4)] == [(r, r, 4) for r in range(4)]
    assert [values[r][3] for r in range(4)] == [[cores[r % len(cores)]] for r in range(4)] or len(cores) >= 4
    assert four.run("torch.get_num_threads()").values[0] == max(1, len(cores) // 4)


@pytest.mark.long
def test_ranks_that_answer_late_are_reached_all_the_same(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if there were hundreds, each of which takes the notebook a millisecond.
    for name in ("HELLO_SECONDS", "HELLO_SECONDS_PER_RANK"):
        monkeypatch.setattr(client, name, 0.0)
    answers = two.connection.client.reach([0, 1], 10.0, lambda: True)
    assert {rank: answer["rank"] for rank, answer in answers.items()} == {0: 0, 1: 1}


def test_the_environment_is_what_torchrun_would_have_set(two: Cluster) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
    values = two.run(f"import os; [os.environ[name] for name in {names.split()}]").values
    assert values == {0: ["0", "0", "2", "2", "127.0.0.1"], 1: ["1", "1", "2", "2", "127.0.0.1"]}


def test_the_process_group_is_up_and_says_gloo(two: Cluster) -> None:
    results = two.run("x = torch.ones(1) * (rank + 1); dist.all_reduce(x); (x.item(), dist.get_backend())")
    assert results.values == {0: (3.0, "gloo"), 1: (3.0, "gloo")}


def test_a_second_init_process_group_is_harmless(two: Cluster) -> None:
    results = two.run("dist.init_process_group('gloo'); x = torch.ones(1); dist.all_reduce(x); x.item()")
    assert results.values == {0: 2.0, 1: 2.0}


def test_a_name_can_be_used_once_at_a_time(two: Cluster) -> None:
    with pytest.raises(ClusterExists, match="attach two"):
        Cluster.start(2, cpu=True, name="two")
    assert two.run("rank").values == {0: 0, 1: 1}


def test_an_idle_cluster_is_next_to_no_work(two: Cluster) -> None:
    roots = [psutil.Process(pid) for pid in (two.entry.controller.pid, two.entry.parent.pid)]
    family = [member for root in roots for member in (root, *root.children(recursive=True))]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = sum(member.num_ctx_switches().voluntary for member in family)
        time.sleep(2)
        # The heartbeat wakes the hub some 5 times a second; at its first pace it is 40 times.
        if (sum(member.num_ctx_switches().voluntary for member in family) - before) / 2 < 15:
            return
    pytest.fail("the heartbeat has not slowed down")


def test_nothing_listens_but_on_loopback(two: Cluster) -> None:
    entry = two.entry
    pids = {process.pid for process in (entry.controller, entry.parent, *entry.ranks)}
    pids |= {child.pid for pid in list(pids) for child in psutil.Process(pid).children(recursive=True)}
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in pids]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_connection_files_are_private(two: Cluster) -> None:
    folder = two.entry.folder
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "profile" / "security").iterdir())


def test_variables_live_from_cell_to_cell(two: Cluster) -> None:
    two.run("kept = rank * 10")
    assert two.run("kept").values == {0: 0, 1: 10}


def test_a_subset_of_ranks(four: Cluster) -> None:
    assert sorted(four.run("rank", ranks="0,2-3").values) == [0, 2, 3]
    assert sorted(four.run("rank", ranks=[1]).values) == [1]


@pytest.mark.parametrize("ranks", ["9", "0-9", "x", "0;__import__('os')", "", []])
def test_what_is_not_a_rank_is_refused(two: Cluster, ranks: str) -> None:
    with pytest.raises(UsageError, match=r"rank") as caught:
        two.run("1", ranks=ranks)
    assert "0-1" in str(caught.value)


def test_output_of_both_streams_arrives_labelled_and_complete(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(8):  # on a busy machine equal lines may come further apart than they are waited for
        results = two.run("import sys\nprint('same')\nprint('rank', rank)\nprint('bad', rank, file=sys.stderr)")
        out, err = capsys.readouterr()
        if "[0-1] same\n" in out:
            break
    assert "[0-1] same\n" in out
    assert "[0] rank 0\n" in out
    assert "[1] rank 1\n" in out
    assert "[0] bad 0\n" in err
    assert results.output[1] == "same\nrank 1\nbad 1\n"


def test_no_line_of_a_flood_is_lost(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two.run("for i in range(20_000): print(rank, i)")
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().out.split("\n")]
    for rank in range(2):
        own = [line.split(" ", 1)[1] for line in lines if line.startswith(f"[{rank}]")]
        assert own == [f"{rank} {i}" for i in range(20_000)]


def test_everything_printed_is_on_disk_too(two: Cluster) -> None:
    two.run("print('to the log', rank * 7)")
    assert "to the log 7\n" in (two.entry.folder / "output" / "rank1.out").read_text()


def test_the_last_value_is_shown_folded(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two.run("torch.arange(3)")
    assert "Out[0-1]:\x1b[0m tensor([0, 1, 2])" in capsys.readouterr().out
    two.run("rank")
    out = capsys.readouterr().out
    assert "Out[0]:\x1b[0m 0" in out
    assert "Out[1]:\x1b[0m 1" in out


def test_await_magics_and_shell_commands_work_in_a_cell(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert two.run("import asyncio\nawait asyncio.sleep(0.01)\nrank").values == {0: 0, 1: 1}
    two.run("%time y = 5\nfiles = !echo one two\nprint(files[0], y)")
    out = capsys.readouterr().out
    assert "Wall time" in out
    assert "one two 5" in out
    two.run("%%capture held\nprint('caught')")
    assert two.run("held.stdout").values == {0: "caught\n", 1: "caught\n"}


def test_tasks_of_one_awaiting_cell_live_on_in_the_next(two: Cluster) -> None:
    two.run(
        "import asyncio\nasync def later():\n    await asyncio.sleep(0.05)\n    return 42\n"
        "await asyncio.sleep(0)\ntask = asyncio.get_running_loop().create_task(later())"
    )
    assert two.run("await task").values == {0: 42, 1: 42}


def test_input_says_that_ranks_have_no_keyboard(two: Cluster) -> None:
    with pytest.raises(CellError, match="no keyboard"):
        two.run("input('name? ')")


def test_a_syntax_error_is_reported_once_and_nothing_runs(two: Cluster) -> None:
    two.run("ran = False")
    with pytest.raises(UsageError, match=r"SyntaxError.*line 2"):
        two.run("ran = True\nx = = 1")
    assert two.run("ran").values == {0: False, 1: False}


def test_equal_failures_are_one_with_the_line_of_the_cell(four: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(8):  # on a busy machine ranks that share cores may fail later than equal failures are waited for
        capsys.readouterr()
        with pytest.raises(CellError) as caught:
            four.run("x = 0\n1 / x")
        if caught.value.ranks == (0, 1, 2, 3):
            break
    assert str(caught.value).startswith("Ranks 0-3 failed: ZeroDivisionError: division by zero, line 2")
    shown = plain(capsys.readouterr().err)
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert "[0-3]" in shown


def test_an_error_that_ends_in_a_full_stop_is_named_with_its_line(two: Cluster) -> None:
    with pytest.raises(CellError, match=r"ValueError: No such thing, line 1$"):
        two.run("raise ValueError('No such thing.')")


def test_a_device_that_computes_nothing_any_more_is_named_with_what_to_type(four: Cluster) -> None:
    with pytest.raises(CellError, match=r"%cluster restart   \(the CUDA context of ranks 0-3 is gone") as caught:
        four.run("raise RuntimeError('CUDA error: device-side assert triggered')")
    assert caught.value.hint.startswith("%cluster restart")
    with pytest.raises(CellError) as other:
        four.run("raise RuntimeError('CUDA error: out of memory')")
    assert not other.value.hint


def test_the_rank_that_failed_first_is_the_cause_and_the_others_are_released(
    four: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError, match=r"Rank 2 failed: ValueError: boom, line 3") as caught:
        four.run("mine = rank + 1\nif rank == 2:\n    raise ValueError('boom')\ndist.all_reduce(torch.ones(1))")
    assert caught.value.rank == 2
    assert "Ranks 0-1,3: released at line 4, in all_reduce" in str(caught.value)
    assert "ValueError: boom" in plain(capsys.readouterr().err)
    results = four.run("x = torch.ones(1); dist.all_reduce(x); (mine, x.item())")
    assert results.values == {r: (r + 1, 4.0) for r in range(4)}
    assert "generation" in capsys.readouterr().err
    assert results.generation == four.connection.generation.number > 1


def test_ranks_that_can_end_by_themselves_keep_their_world(four: Cluster) -> None:
    four.run("dist.barrier()")
    before = four.connection.generation.number
    with pytest.raises(CellError, match="Rank 1 failed"):
        four.run("if rank == 1: raise ValueError\nprint('others finish')")
    four.run("dist.barrier()")
    assert four.connection.generation.number == before


def test_ddp_and_fsdp_objects_train_on_in_the_next_generation(two: Cluster) -> None:
    two.run(
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(0)\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "fsdp = fully_shard(torch.nn.Linear(4, 4))\n"
        "def step(model):\n"
        "    model.zero_grad(); model(torch.ones(2, 4) * (rank + 1)).sum().backward()\n"
        "    return float(sum(p.grad.full_tensor().sum() if hasattr(p.grad, 'full_tensor') else p.grad.sum()\n"
        "                     for p in model.parameters()))\n"
        "before = step(ddp), step(fsdp)"
    )
    with pytest.raises(CellError, match="Rank 0 failed"):
        two.run("if rank == 0: raise RuntimeError('in the middle')\nstep(ddp)")
    values = two.run("before == (step(ddp), step(fsdp)), before[0] != 0").values
    assert values == {0: (True, True), 1: (True, True)}


def test_a_world_destroyed_by_the_user_is_there_again(two: Cluster) -> None:
    two.run("dist.destroy_process_group()")
    assert two.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize(
    "source",
    ["dist.destroy_process_group()", "dist.destroy_process_group(); dist.init_process_group('gloo')"],
    ids=["destroyed", "destroyed and initialised"],
)
def test_a_world_that_one_rank_alone_destroyed_is_there_again(two: Cluster, source: str) -> None:
    with suppress(CellError):  # it waits for the other rank, as under torchrun
        two.run(source, ranks=[0], timeout=0.5)
    for _ in range(2):
        assert two.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}


def test_a_cell_sent_while_another_runs_names_it(two: Cluster) -> None:
    handle = two.run("import time; time.sleep(1)", detach=True)
    with pytest.raises(CellRunning, match=r"time\.sleep\(1\)"):
        two.run("1")
    with pytest.raises(CellRunning, match="push"):
        two.push({"x": 1})
    assert two.run("'after'", queue=True).values[0] == "after"
    assert handle.status == "ok"


def test_a_detached_cell_gives_the_prompt_back_and_can_be_waited_for(two: Cluster) -> None:
    handle = two.run("print('tick'); import time; time.sleep(0.5); 7", detach=True)
    assert handle.status == "running"
    assert ", ranks 0-1, 0 s)" in repr(handle) and ", ranks 0-1)" in handle._bundle(age=False)["text/plain"]
    assert two.wait() is not None
    assert handle.wait().values == {0: 7, 1: 7}
    assert handle.output[1] == "tick\n"
    assert handle.status == "ok"


def test_waiting_has_a_time_out_that_leaves_the_cell_alone(two: Cluster) -> None:
    handle = two.run("import time; time.sleep(1); 7", detach=True)
    with pytest.raises(TimeoutError, match="still runs"):
        handle.wait(timeout="0.1s")
    assert handle.wait(timeout=30).values == {0: 7, 1: 7}


def test_a_detached_cell_that_fails_says_so_to_whoever_waits(two: Cluster) -> None:
    handle = two.run("1 / 0", detach=True)
    with pytest.raises(CellError, match="ZeroDivisionError"):
        handle.wait()
    assert handle.status == "error"


@pytest.mark.parametrize(
    "stuck",
    [
        "import time; time.sleep(60)",
        "while True: pass",
        "dist.recv(torch.ones(1), 1 - rank)",
        "import time\ntime.sleep(60) if rank else dist.all_reduce(torch.ones(1))",
    ],
    ids=["sleep", "busy loop", "everyone in a collective", "one asleep, one in a collective"],
)
def test_stop_ends_a_cell_and_variables_live_on(two: Cluster, stuck: str) -> None:
    two.run("alive = rank + 1")
    handle = two.run(stuck, detach=True)
    time.sleep(0.3)
    assert handle.stop().status == "interrupted"
    assert two.run("x = torch.ones(1); dist.all_reduce(x); (alive, x.item())").values == {0: (1, 2.0), 1: (2, 2.0)}


def test_a_timeout_stops_the_cell_and_is_an_error(two: Cluster) -> None:
    with pytest.raises(CellError, match=r"--timeout"):
        two.run("import time; time.sleep(60)", timeout="0.3s")


def test_a_time_that_is_none_is_refused_before_the_cell_runs(two: Cluster) -> None:
    with pytest.raises(UsageError, match="'soon' is no length of time"):
        two.run("began = True", timeout="soon")
    assert two.run("'began' in globals()").values == {0: False, 1: False}
    assert two.run("rank").values == {0: 0, 1: 1}


def test_an_interrupt_that_user_code_swallows_is_repeated(two: Cluster) -> None:
    handle = two.run(
        "import time\nfor _ in range(3):\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass", detach=True
    )
    time.sleep(0.3)
    handle.stop()
    assert handle.status in ("ok", "interrupted")


def test_a_cell_costs_the_notebook_none_of_ipyparallels_records_of_each_call(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.run("0")  # forms the world again, if a test has broken it
    client, looked, woken = two.connection.client.ipp, list[str](), list[object]()
    monkeypatch.setattr("ipyparallel.util._parse_date", looked.append)
    send = type(client)._send_calls
    monkeypatch.setattr(type(client), "_send_calls", lambda *args: (woken.append(args), send(*args)))

    assert two.run("rank").values == {0: 0, 1: 1}

    assert len(woken) == 1, "the client's thread is woken once for all ranks"
    assert not looked, "times in replies are not parsed"
    assert client._calls == {} and not client.history and not client.outstanding


def test_the_number_of_ranks_is_not_read_for_each_record_of_a_cell(
    four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, take, taken = list[int](), four.connection._take_record, list[int]()

    def counted(*record: Any) -> None:
        before = len(read)
        take(*record)
        taken.append(len(read) - before)

    monkeypatch.setattr(four.connection, "read_size", lambda: read.append(1))
    monkeypatch.setattr(four.connection, "_take_record", counted)

    four.run("rank")

    assert taken == [0, 0, 0, 1]


@pytest.fixture(scope="module")
def mortal(nbkit_home: object) -> Iterator[Cluster]:
    """Yield a cluster whose ranks may be killed. Only the last test leaves a dead rank behind."""
    cluster = Cluster.start(3, cpu=True, name="mortal")
    yield cluster
    cluster.stop()


def test_a_rank_that_dies_is_named_and_the_others_are_released(mortal: Cluster) -> None:
    mortal.run("kept = rank")
    with pytest.raises(CellError, match="Rank 1 died: SIGKILL") as caught:
        mortal.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))")
    assert caught.value.rank == 1
    assert "Ranks 0,2: released" in str(caught.value)
    with pytest.raises(Exception, match=r"Rank 1 has died \(SIGKILL\)"):
        mortal.run("rank")
    assert mortal.run("kept", ranks=[0, 2]).values == {0: 0, 2: 2}
    assert "dead (SIGKILL)" in repr(mortal.status())
    pins = mortal.entry.reasons
    mortal.restart()
    assert mortal.entry.reasons == pins
    assert mortal.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == dict.fromkeys(range(3), 3.0)


def test_an_idle_rank_that_dies_is_noticed_before_the_next_cell(mortal: Cluster) -> None:
    os.kill(mortal.entry.ranks[0].pid, signal.SIGSEGV)
    until(lambda: mortal.connection.deaths, 20)
    with pytest.raises(Exception, match=r"Rank 0 has died \(SIGSEGV\)"):
        mortal.run("1")


def test_an_exception_of_ones_own_that_is_called_stopped_fails_its_cell(two: Cluster) -> None:
    with pytest.raises(CellError) as caught:
        two.run("class Stopped(Exception): ...\nraise Stopped('mine')")
    assert "Rank" in str(caught.value) and "failed: Stopped: mine, line 2" in str(caught.value)


TRAINER = """
from torch.nn import functional as F
data = [(torch.ones(4), torch.tensor(i % 2)) for i in range(16)]
trainer = nbkit.Trainer(model=lambda: torch.nn.Linear(4, 2), loss=F.cross_entropy, data=data, batch_size=8,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), log_dir=None, progress=False)
"""


def test_what_all_ranks_do_together_is_no_hang_where_one_does_it_alone(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    two.run(TRAINER)
    alone = {
        "if rank == 0:\n    trainer.fit(5)": ("rank 0: fit at line 2", "rank 1 has ended this cell"),
        "if rank == 1:\n    trainer.full_state_dict()\ndist.barrier()": (
            "rank 1: full_state_dict at line 2",
            "rank 0 waits in barrier at line 3",
        ),
    }
    for source, texts in alone.items():
        with pytest.raises(CellError, match="made different calls"):
            two.run(source, timeout=60)
        said = plain(capsys.readouterr().err)
        assert all(text in said for text in texts), said
    with pytest.raises(CellError):
        two.run("trainer.evaluate(data)", ranks=[0], timeout=60)
    assert "rank 1 does not run this cell" in plain(capsys.readouterr().err)
    assert two.run("len(trainer.fit(2))").values == {0: 2, 1: 2}
