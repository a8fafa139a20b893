"""Test one and more presses of Stop, on ranks that answer, that hold the interpreter lock, and that never answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from nbkit import Cluster
from nbkit.errors import CellError, CellStopped
from nbkit.notebook.cluster.cells import stop as rank_signals
from nbkit.notebook.cluster.cells.handle import CellHandle

# Both hold the interpreter lock. `re` checks for signals now and then; the sum never does.
REGEX = "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')"
C_CALL = "sum(range(10**11))"
SWALLOWS = """
import time
end = time.monotonic() + 2
while time.monotonic() < end:
    try: time.sleep(0.2)
    except KeyboardInterrupt: pass
"""


def press(cluster: Cluster) -> None:
    """Send the signal of the stop button. Send none after the cell has ended, because that would end the tests."""
    if is_in_cell(cluster):
        os.kill(os.getpid(), signal.SIGINT)


def run_pressed(cluster: Cluster, source: str, presses: Callable[[], object], **options: Any) -> BaseException:
    """Run a cell, and `presses` in another thread. Return what the cell raised."""
    presser = threading.Thread(target=presses, daemon=True)
    presser.start()
    with pytest.raises((CellStopped, CellError)) as raised:
        cluster.run(source, **options)
    presser.join()
    return raised.value


def is_in_cell(cluster: Cluster) -> bool:
    return cluster.connection.busy() is not None


class Shown:
    """The text on stderr so far, for a thread that waits for words in it."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture, self.text = capture, ""

    def __contains__(self, words: str) -> bool:
        self.text += self.capture.readouterr().err
        return words in self.text


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capsys)


@pytest.fixture(scope="module")
def mortal(nbkit_home: object) -> Iterator[Cluster]:
    """Yield a cluster whose ranks may be lost. Each test that ends a rank uses another one, and rank 0."""
    cluster = Cluster.start(4, cpu=True, name="mortal", ttl=600)
    cluster.run("kept = rank + 1")
    yield cluster
    cluster.stop()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of a stop."""
    for name in ("ANSWER_SECONDS", "PATIENCE_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(f"nbkit.notebook.cluster.cells.stop.{name}", 0.7)


@pytest.mark.long
@pytest.mark.parametrize("source", [SWALLOWS, REGEX], ids=["swallows interrupts for a while", "holds the interpreter"])
def test_quick_presses_end_no_rank_that_would_still_answer(two: Cluster, shown: Shown, source: str) -> None:
    two.run("kept = rank + 1")

    def presses() -> None:
        until(lambda: is_in_cell(two))
        time.sleep(0.5)
        for _ in range(4):
            press(two)
            time.sleep(0.15)

    stopped = run_pressed(two, source, presses)

    assert "variables live on" in str(stopped)
    assert two.connection.deaths == {}
    assert two.run("x = torch.ones(1); dist.all_reduce(x); (kept, x.item())").values == {0: (1, 2.0), 1: (2, 2.0)}
    assert "nobody is ended yet" in shown
    assert "ended now" not in shown


@pytest.mark.parametrize(
    ("ranks", "held"),
    [
        ("rank == 1", REGEX),
        pytest.param("True", REGEX, marks=pytest.mark.long),
        ("rank == 1", "import ctypes; ctypes.PyDLL(None).sleep(60)"),
    ],
    ids=["one rank in a regex", "all ranks", "one rank in a C call that a signal ends"],
)
def test_one_press_interrupts_a_rank_that_holds_its_interpreter_without_ending_it(
    two: Cluster, shown: Shown, ranks: str, held: str
) -> None:
    two.run("kept = rank + 1")
    handle = two.run(f"if {ranks}:\n    {held}\nelse:\n    import time; time.sleep(60)", detach=True)
    time.sleep(0.5)

    assert handle.stop().status == "interrupted"

    assert {record.status for record in handle._execution.records.values()} == {"interrupted"}
    assert two.connection.deaths == {}
    assert "interrupted from outside now (SIGINT)" in shown
    # No interrupt is left for the next cell.
    assert two.run("import time; time.sleep(0.5); kept").values == {0: 1, 1: 2}
    assert two.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}


SLOW_PACKAGE = """
import builtins, pathlib, time
builtins.times_begun = getattr(builtins, "times_begun", 0) + 1
pathlib.Path({begun!r}).touch()
for _ in range(30):
    time.sleep(0.1)
value = 7
"""


@pytest.mark.parametrize("ends", ["release", "stop"])
def test_a_release_and_a_stop_wait_for_the_import_of_an_installed_package(
    two: Cluster, tmp_path: Path, ends: str
) -> None:
    begun, installed, name = tmp_path / "begun", tmp_path / "site-packages", f"slow_{ends}"
    installed.mkdir()
    (installed / f"{name}.py").write_text(SLOW_PACKAGE.format(begun=str(begun)))
    two.run(f"import builtins, pathlib, sys, time; sys.path.append({str(installed)!r}); builtins.times_begun = 0")
    other = f"while not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.01)\n    "
    other += "raise ValueError('meanwhile')" if ends == "release" else "time.sleep(60)"
    handle = two.run(f"if rank == 0:\n    import {name}\n    time.sleep(60)\nelse:\n    {other}", detach=True)
    if ends == "stop":
        until(begun.exists)
        assert handle.stop().status == "interrupted"
    else:
        with pytest.raises(CellError, match="Rank 1 failed: ValueError: meanwhile"):
            handle.wait()

    found = two.run(f"import {name}; ({name}.value, builtins.times_begun)", ranks="0")
    assert found.values == {0: (7, 1)}


def test_the_import_of_a_users_module_is_interrupted_at_once(two: Cluster, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "own_training.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)"
    )
    handle = two.run(f"import sys; sys.path.append({str(tmp_path)!r}); import own_training", ranks="0", detach=True)
    until(begun.exists)
    assert handle.stop().status == "interrupted"


def test_stop_interrupts_a_single_rank_that_holds_its_interpreter(two: Cluster) -> None:
    handle = two.run(REGEX, ranks="0", detach=True)
    time.sleep(0.5)
    assert handle.stop().status == "interrupted"
    assert two.connection.deaths == {}


def test_the_parent_interrupts_ranks_on_another_host(
    two: Cluster, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = two.run(f"if rank == 1:\n    {REGEX}\nelse:\n    import time; time.sleep(60)", detach=True)
    time.sleep(0.5)
    monkeypatch.setattr(two.connection, "entry", replace(two.entry, host="elsewhere"))

    assert handle.stop().status == "interrupted"

    assert two.connection.deaths == {}
    assert {record.status for record in handle._execution.records.values()} == {"interrupted"}


def test_a_sigint_handler_of_a_cell_is_called_and_does_not_prevent_the_stop(two: Cluster) -> None:
    # A program may have such a handler to save at Ctrl-C. It is removed in the next cell.
    handler = """
import signal, time
pressed = []
signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
"""
    blocked = f"{handler}signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
    loop = "while True: time.sleep(0.05)"
    for source in (f"{handler}{loop}", "import time; time.sleep(600)", f"{blocked}{loop}", f"{handler}{loop}"):
        error = run_pressed(two, source, lambda: (until(lambda: is_in_cell(two)), time.sleep(1), press(two)))
        assert isinstance(error, CellStopped) and "variables live on" in str(error), error
    found = two.run("(len(pressed), signal.getsignal(signal.SIGINT).__qualname__)").values
    assert all(1 <= count <= 4 and name == "Runner._on_sigint" for count, name in found.values()), found
    assert two.run(f"{handler}len(pressed)").values == {0: 0, 1: 0}


@pytest.mark.long
def test_stop_warns_before_a_press_ends_a_rank_that_never_answers(mortal: Cluster, shown: Shown) -> None:
    def presses() -> None:
        until(lambda: is_in_cell(mortal))
        time.sleep(0.5)
        press(mortal)
        time.sleep(0.3)
        press(mortal)  # too early: it only gets an answer
        until(lambda: "press stop again" in shown)
        press(mortal)  # too early: the warning must be shown for 2 s
        time.sleep(2.5)
        assert mortal.connection.deaths == {}
        press(mortal)

    source = f"if rank == 1: {C_CALL}\nelse:\n    import time; time.sleep(60)"
    stopped = run_pressed(mortal, source, presses, ranks=[0, 1])

    assert "Rank 1 had to be ended" in str(stopped)
    assert list(mortal.connection.deaths) == [1]
    assert mortal.run("kept", ranks=[0]).values == {0: 1}
    rungs = [
        "nobody is ended yet",
        "Rank 1 has not answered for ",
        "interrupted from outside now (SIGINT)",
        "Rank 1 has not ended, ",
        "Rank 1 answers neither the request nor SIGINT: it computes in code",
        "press stop again, 2 s from now or later: that ends rank 1, and its variables are lost.",
        "Rank 1 is ended now; its variables are lost.",
    ]
    assert "Rank 1 is ended now" in shown
    places = [shown.text.find(rung) for rung in rungs]
    assert -1 not in places, shown.text
    assert places == sorted(places)


@pytest.mark.usefixtures("hurried")
def test_a_suspended_rank_is_named_and_not_ended_by_one_press(two: Cluster, shown: Shown) -> None:
    two.run("kept = rank + 1")
    rank = two.entry.ranks[1]

    def presses() -> None:
        until(lambda: is_in_cell(two))
        time.sleep(0.5)
        rank.end(signal.SIGSTOP)
        press(two)
        until(lambda: "it is suspended (SIGSTOP)" in shown)
        time.sleep(2)  # longer than all waits of a stop
        rank.end(signal.SIGCONT)

    stopped = run_pressed(two, "import time; time.sleep(60)", presses)

    assert "variables live on" in str(stopped)
    assert two.connection.deaths == {}
    assert two.run("kept").values == {0: 1, 1: 2}


@pytest.mark.usefixtures("hurried")
def test_the_last_press_frees_the_notebook_and_a_late_interrupt_ends_the_cell(
    two: Cluster, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.run("kept = rank + 1")
    monkeypatch.setattr(rank_signals, "end", lambda *args: None)  # as if it waits for a lost disk
    rank = two.entry.ranks[1]

    def presses() -> None:
        until(lambda: is_in_cell(two))
        time.sleep(0.5)
        rank.end(signal.SIGSTOP)
        press(two)
        until(lambda: "press stop again" in shown)
        time.sleep(1.2)
        press(two)
        until(lambda: "is ended now" in shown)
        time.sleep(1.5)
        press(two)

    stopped = run_pressed(two, "import time; time.sleep(60)", presses)

    assert "stopped waiting; cell" in str(stopped)
    rank.end(signal.SIGCONT)
    ended = two.wait()
    assert ended is None or ended.status == "interrupted"
    assert two.run("kept").values == {0: 1, 1: 2}


@pytest.mark.usefixtures("hurried")
def test_a_timeout_ends_a_rank_that_never_answers_and_says_when(
    mortal: Cluster, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbkit.notebook.cluster.cells.stop.END_AFTER_SECONDS", 1.0)
    with pytest.raises(CellError, match=r"stopped after 1 s \(--timeout\).*Rank 2 had to be ended"):
        mortal.run(f"if rank == 2: {C_CALL}", ranks=[0, 2], timeout=1)
    assert "If not over 1 s from now, or when you press stop: that ends rank 2" in shown
    assert 2 in mortal.connection.deaths
    assert mortal.run("kept", ranks=[0]).values == {0: 1}


@pytest.mark.long
@pytest.mark.usefixtures("hurried")
def test_stop_calls_of_other_threads_count_as_presses(mortal: Cluster, shown: Shown) -> None:
    handle = mortal.run(f"if rank == 3: {C_CALL}", ranks=[0, 3], detach=True)
    time.sleep(0.5)
    stops = [threading.Thread(target=handle.stop, daemon=True) for _ in range(2)]
    stops[0].start()
    until(lambda: "press stop again" in shown)
    time.sleep(1.5)
    assert 3 not in mortal.connection.deaths
    stops[1].start()
    for stop in stops:
        stop.join(timeout=30)
    assert handle.status == "interrupted"
    assert 3 in mortal.connection.deaths
    assert shown.text.count("has not ended") == 1


# Rank 1 sleeps within the optimizer's step: an interrupt there leaves rank 0 a step ahead.
SLOW_TRAINING = """
import time
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(naps.pop() * rank if naps else 0)
        super().step(closure)
naps = []
trainer = nbkit.Trainer(
    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=8, layers=2, heads=2, width=8)),
    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    optimizer=lambda model: Slow(model.parameters(), lr=0.1),
    data=nbkit.TextDataset(block=8, limit=1000), batch_size=4, strategy="tp=2", log_dir=None, progress=False)
trainer.fit(2)
naps += [NAPS]
trainer.fit(2)
"""


def slow_training(cluster: Cluster, naps: str) -> CellHandle:
    """Start a training, and return after step 4. Steps 3 and 4 take 1.2 s. naps: seconds of the later ones."""
    cluster.run(SLOW_TRAINING.replace("NAPS", f"{naps}, 1.2, 1.2"))
    handle = cluster.run("trainer.fit(1000)", detach=True)
    until(lambda: cluster.training.look()["step"] > 4)
    return handle


def test_a_training_of_long_steps_stops_at_a_boundary_and_not_within_a_step(two: Cluster, shown: Shown) -> None:
    handle = slow_training(two, naps="*[1.2] * 99")
    assert handle.stop().status == "interrupted"
    steps = two.run("naps.clear(); trainer.fit(2)[-1]['step']").values
    assert steps[0] == steps[1] > 5
    assert "The training stops after the current step, which may take " in shown
    assert "has not ended" not in shown


@pytest.mark.long
def test_a_second_press_interrupts_a_training_of_long_steps_within_its_step(two: Cluster, shown: Shown) -> None:
    patience = "from nbkit.rank.train.control import step_boundary; step_boundary.LEAST_PATIENCE = "
    two.run(f"{patience}600")  # without the second press, the test times out before an interrupt
    handle = slow_training(two, naps="600, 1.2")
    time.sleep(1.5)
    first = threading.Thread(target=handle.stop, daemon=True)
    first.start()
    until(lambda: "Press stop again" in shown)
    time.sleep(2.2)
    handle.stop()
    first.join(timeout=30)
    assert handle.status == "interrupted"
    assert "The training is interrupted within its step." in shown
    assert two.connection.deaths == {}
    two.run(f"{patience}1.5")
