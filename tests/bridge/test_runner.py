"""Test a cell on a rank: its interrupts, its stored output, the text of its errors, and the output of its children."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time

import pytest

from nbkit import Cluster
from nbkit.errors import CellError, TransferError
from nbkit.wire.messages import CompleteName, GetStatus

INSIDE = "from nbkit.bridge import calls; runner = calls.runner\n"


def test_a_cell_can_be_stopped_after_a_traceback_shown_within_it(two: Cluster) -> None:
    two.run(f"{INSIDE}went = get_ipython().run_cell('1 / 0').success; open_to_stop = runner.in_user_code")
    assert two.run("went, open_to_stop").values == dict.fromkeys((0, 1), (False, True))


def test_a_stop_that_arrives_before_the_cell_begins_ends_it(two: Cluster) -> None:
    two.run(
        f"{INSIDE}import time\ndef late(*cell, **how): time.sleep(1); return type(runner).run(runner, *cell, **how)\n"
        "runner.run = late"
    )
    handle = two.run("began = True; time.sleep(500)", detach=True)
    assert handle.stop(end_after="1s").status == "interrupted"
    two.run("del runner.run")
    assert two.run("'began' in globals()").values == {0: False, 1: False}


def test_a_rank_that_is_released_formats_no_traceback(two: Cluster) -> None:
    """Check this because formatting takes a second of a core, and the notebook shows only the first traceback."""
    two.run(
        "formatted, ip = [], get_ipython()\ndef told(kind, *_, **__): formatted.append(kind.__name__); return ['']\n"
        "ip.InteractiveTB.structured_traceback = told"
    )
    with pytest.raises(CellError, match="Rank 1 failed: ValueError: mine"):
        two.run("if rank == 1: raise ValueError('mine')\ndist.barrier()")
    two.run("del ip.InteractiveTB.structured_traceback")
    assert two.run("formatted").values == {0: [], 1: ["ValueError"]}


BAD = """
import sys
class Bad(Exception):
    def __str__(self):
        {}
"""


def test_an_error_whose_text_exits_is_shown_with_frames_but_without_text(two: Cluster) -> None:
    two.run(BAD.format("sys.exit(0)"))
    with pytest.raises(
        CellError, match=r"Ranks 0-1 failed: Bad: \(its text cannot be made: SystemExit\), line 2"
    ) as bad:
        two.run("x = 1\nraise Bad()")
    assert "raise" in bad.value.traceback
    assert two.run("x").values == {0: 1, 1: 1}


def test_stop_ends_an_error_text_that_never_ends(two: Cluster) -> None:
    two.run(BAD.format("while True: pass"))
    handle = two.run("print('in it')\nraise Bad()", detach=True)
    while not all("in it" in text for text in handle.output.values()):
        time.sleep(0.01)
    assert handle.stop().status == "interrupted"
    assert two.run("1").values == {0: 1, 1: 1}


def test_ranks_do_not_wait_for_an_error_text_that_never_ends(two: Cluster) -> None:
    two.run(BAD.format("while True: pass") + "from nbkit.bridge import runner as module\nmodule.TEXT_SECONDS = 1.1")
    with pytest.raises(CellError, match=r"Rank 1 failed: Bad: \(its text takes too long"):
        two.run("if rank == 1: raise Bad()\ndist.barrier()")
    assert two.run("module.TEXT_SECONDS = 20.0; x").values == {0: 1, 1: 1}


@pytest.mark.long
@pytest.mark.parametrize("where", ["reduce", "text"])
def test_stop_ends_the_sending_of_a_value_that_never_ends(two: Cluster, where: str) -> None:
    fails = "while True: pass" if where == "reduce" else "raise Bad()"
    two.run("x = 1\n" + BAD.format("while True: pass") + f"class Stuck:\n    def __reduce__(self):\n        {fails}")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        two.pull("Stuck()")
    assert two.run("x").values == {0: 1, 1: 1}


def test_a_value_that_exits_is_refused_and_the_rank_survives(two: Cluster) -> None:
    two.run("import sys\nclass Exits:\n    def __reduce__(self): sys.exit(4)")
    with pytest.raises(TransferError, match="SystemExit: 4"):
        two.pull("Exits()")
    assert two.run("x").values == {0: 1, 1: 1}


def test_stop_ends_the_code_of_a_widget(two: Cluster) -> None:
    """Run code of a widget that never ends between two cells, so that the second cell waits for it."""
    two.run(
        "from comm import create_comm\nbegun = []\n"
        "def stuck(message):\n    begun.append(1)\n    while True: pass\n"
        "comm = create_comm(target_name='jupyter.widget', data={}); comm.on_msg(stuck)"
    )
    comm = two.pull("comm.comm_id", ranks=1)
    two.connection.client.relay(1, "comm_msg", {"comm_id": comm, "data": {}}, {}, [])
    handle = two.run("len(begun)", ranks=[1], detach=True)
    time.sleep(0.3)
    handle.stop()
    assert two.run("x").values == {0: 1, 1: 1}


def test_the_rank_answers_requests_while_dir_of_an_object_never_ends(two: Cluster) -> None:
    two.run(
        "class Stuck:\n    def __dir__(self):\n        while looked: pass\n        return []\n"
        "stuck, looked = Stuck(), 1"
    )
    asked = [two.connection.client.ask([0], CompleteName("stuck.a"), timeout=10)[0]["matches"] for _ in range(2)]
    assert asked == [[], []]
    assert two.connection.client.ask([0], GetStatus())[0]["rank"] == 0
    two.run("looked = 0")


def test_a_long_chain_of_errors_is_shown_without_its_middle(two: Cluster) -> None:
    two.run(
        "def fail(n):\n    try:\n        fail(n - 1) if n else 1 / 0\n"
        "    except Exception as error:\n        raise ValueError(n) from error"
    )
    with pytest.raises(CellError, match="Ranks 0-1 failed: ValueError: 40") as failed:
        two.run("fail(40)")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", failed.value.traceback)
    assert "36 of 42 errors of the chain are left out" in shown
    assert shown.count("direct cause") == 5 and "division by zero" in shown and "ValueError: 39" in shown


@pytest.mark.long
def test_text_flushed_after_each_character_is_sent_in_few_messages_and_in_order(two: Cluster) -> None:
    two.run(
        "import sys\nfrom IPython.display import display\nfor i in range(2000):\n"
        "    print('x', end='', flush=True)\n    if i in (500, 1500):\n"
        "        print('error', file=sys.stderr, flush=True)\n        display(i)"
    )
    log = (two.entry.folder / "output" / "rank1.jsonl").read_text().splitlines()
    kept = [each for each in map(json.loads, log) if each["cell"] == json.loads(log[-1])["cell"]]
    assert len(kept) < 1000
    order = [
        each["content"]["text"].replace("x", "") if each["kind"] == "stream" else each["content"]["data"]["text/plain"]
        for each in kept
    ]
    assert [part for part in order if part] == ["error\n", "500", "error\n", "1500"]
    before = "".join(each["content"]["text"] for each in kept[: order.index("500")] if each["kind"] == "stream")
    assert before == "x" * 501 + "error\n"


def test_output_that_a_full_disk_cannot_store_is_still_shown(two: Cluster) -> None:
    """Limit the size of files, which has the effect of a full disk."""
    two.run("import resource\nlimit, before = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)")
    shown = two.run("resource.setrlimit(limit, (1, before[1]))\nfor i in range(5): print('line', i)\ni", timeout=20)
    assert shown.values == {0: 4, 1: 4}
    assert "line 0\nline 1\nline 2\nline 3\nline 4\n" in shown.output[1]
    assert "What this cell shows is not kept on disk" in shown.output[1]
    two.run("resource.setrlimit(limit, before)")
    assert two.run("print('kept')").output[1] == "kept\n"
    log = (two.entry.folder / "output" / "rank1.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["content"]["text"] == "kept\n"


def test_a_cell_does_not_wait_for_output_that_is_lost(two: Cluster) -> None:
    lost = two.run("calls.runner.capture.stack[-1].count += 3\nprint('here')", timeout=30)
    assert lost.status == "ok" and "here" in lost.output[0]


def test_an_interrupt_that_comes_after_its_cell_has_no_effect(two: Cluster) -> None:
    two.run(
        INSIDE + "from nbkit.bridge.runner import Running\nimport time\n"
        "late = Running(runner.running[0].request, 0.0); late.ended.set()\n"
        "runner.interrupt(late); time.sleep(0.05)\n"
        "try: runner.interrupt(runner.running[0]); time.sleep(60)\n"
        "except KeyboardInterrupt: caught = True"
    )
    assert two.run("caught").values == {0: True, 1: True}


def test_storing_the_output_of_a_nested_cell_cannot_be_interrupted(two: Cluster) -> None:
    open_to_interrupts = two.run(
        INSIDE + "from nbkit.wire.cells import CellRequest\nseen = []\n"
        "def end(capturing): seen.append(runner.in_user_code); del runner.capture.end; runner.capture.end(capturing)\n"
        "runner.capture.end = end\n"
        "runner.run(CellRequest('nested', 'within = runner.in_user_code', 9, (0, 1)))\n"
        "within, seen, runner.in_user_code"
    )
    assert open_to_interrupts.values == dict.fromkeys((0, 1), (True, [False], True))


def test_a_cell_ends_even_if_its_record_cannot_be_made(two: Cluster) -> None:
    with pytest.raises(CellError, match="no space left"):
        two.run(
            INSIDE + "def end(capturing):\n"
            "    del runner.capture.end; runner.capture.end(capturing); raise OSError('no space left')\n"
            "runner.capture.end = end"
        )
    assert two.run("len(runner.running), len(runner.capture.stack)").values == {0: (1, 1), 1: (1, 1)}


def test_a_value_that_contains_itself_is_shown_as_text(two: Cluster) -> None:
    assert two.run("x = []; x.append(x); x").values == {0: "[[...]]", 1: "[[...]]"}


@pytest.mark.long
def test_prints_of_a_forked_child_arrive_and_its_displays_are_dropped(two: Cluster) -> None:
    cell = two.run(
        "import os, sys\npid = os.fork()\nif pid == 0:\n"
        "    print('printed by a child'); print('and its stderr', file=sys.stderr); display('lost')\n"
        "    sys.stdout.flush(); os._exit(0)\n"
        "os.waitpid(pid, 0)[1]"
    )
    assert cell.values == {0: 0, 1: 0}
    two.run("import time; time.sleep(0.3)")  # for the thread that reads the descriptors
    text = (two.entry.folder / "output" / "rank1.out").read_text()
    assert "printed by a child\n" in text
    assert "and its stderr\n" in text
    assert "lost" not in (two.entry.folder / "output" / "rank1.jsonl").read_text()


def test_the_replay_log_is_cut_before_a_cell_and_keeps_the_last_cell(two: Cluster) -> None:
    two.run(
        "from nbkit.bridge import calls\nfrom nbkit.bridge import output as capture\n"
        "kept = capture.LOG_LIMIT; capture.LOG_LIMIT = 4000\n"
        "first = calls.runner.running[0].request.id; print('x' * 5000)"
    )
    logs = [two.entry.folder / "output" / name for name in ("rank0.jsonl", "rank0.out")]
    assert all("xxx" in log.read_text() for log in logs)
    two.run("second = calls.runner.running[0].request.id; print('the second')")
    assert not any("xxx" in log.read_text() for log in logs)
    assert all("the second" in log.read_text() for log in logs)
    found = two.run(
        "capture.LOG_LIMIT = kept\nfound, _ = calls.runner.capture.missed(second, 0, 10_000)\n"
        "''.join(output['content']['text'] for output in found)"
    )
    assert found.values == {0: "the second\n", 1: "the second\n"}


def test_a_rank_knows_whether_its_cell_is_detached(two: Cluster) -> None:
    ask = "from nbkit.rank.train.control.step_boundary import DETACHED\n"
    awaits = "import asyncio; await asyncio.sleep(0); "
    told = [two.run(ask + start + "DETACHED.get()", detach=True).wait().values for start in ("", awaits)]
    assert told == [dict.fromkeys((0, 1), True)] * 2
    assert two.run(ask + "DETACHED.get()").values == dict.fromkeys((0, 1), False)


LONG = 3_000_000


@pytest.mark.parametrize(
    "source",
    ["'y' * LONG", "from IPython.display import display; display({'text/plain': 'y' * LONG}, raw=True)"],
    ids=["a value", "displayed"],
)
def test_a_long_value_is_shown_without_its_middle(
    two: Cluster, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    two.run(source.replace("LONG", str(LONG)), ranks=[1])
    shown = capsys.readouterr().out
    assert "characters left out: %pull brings the whole value" in shown
    assert 50_000 < len(shown) < 110_000


def test_a_picture_over_the_limit_is_replaced_by_a_message(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two.run(
        "from IPython.display import display; display({'image/png': 'y' * (17 << 20), 'text/plain': 'plot'}, raw=True)",
        ranks=[1],
    )
    shown = capsys.readouterr().out
    assert "plot" in shown
    assert "not shown, the limit is 16,777,216: image/png of 17,825,792 characters" in shown


def test_a_long_error_is_shown_without_its_middle(two: Cluster) -> None:
    with pytest.raises(CellError) as failed:
        two.run(f"raise ValueError('y' * {LONG} + 'the end')", ranks=[1])
    assert "the end" in failed.value.traceback
    assert len(failed.value.traceback) + len(str(failed.value)) < 500_000
