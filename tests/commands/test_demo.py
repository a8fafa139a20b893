"""Test `nbkit demo` in a terminal: run to the end, and stopped before the end."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_parents import forked_parents_of_kernels

from nbkit.commands import demo as command
from nbkit.notebook.cluster import registry

# The same notebook with half the batch, a smaller model, and almost no pause between switches. The training that is
# switched sleeps after each step, so that few steps are enough for all switches; the other training does not sleep.
SMALLER = """
import json
import sys
from nbkit.commands import demo, main

def smaller(path, read=demo.read_notebook):
    text = json.dumps(read(path))
    rests = "data=text, callbacks=[lambda *_: 'never' in globals() or __import__('time').sleep(0.25)],"
    for old, new in (
        ("block=64", "block=16"),
        ("layers=4, heads=8, width=96", "layers=2, heads=4, width=32"),
        ("data=text,", rests),
    ):
        assert old in text
        text = text.replace(old, new)
    return json.loads(text)

demo.BATCH, demo.PACE_SECONDS, demo.read_notebook = 8, 0.3, smaller
sys.exit(main(sys.argv[1:]))
"""


def test_help_names_the_allowed_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MOST_RANKS", 12)
    monkeypatch.setattr(command, "CPU_RANKS", 6)
    parser = argparse.ArgumentParser()
    command.prepare_parser(parser)
    text = " ".join(parser.format_help().split())

    assert "number of ranks: even, at most 12; default: one per idle GPU, or 6 on the CPU" in text


def environment(folder: Path) -> dict[str, str]:
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME")
    return {**os.environ, "COLUMNS": "120", **{name: str(folder / name) for name in names}}


def start(folder: Path, *options: str, smaller: bool = False, **streams: Any) -> subprocess.Popen[bytes]:
    how = ["-c", SMALLER] if smaller else ["-m", "nbkit"]
    command = [sys.executable, *how, "demo", "--cpu", *options]
    return subprocess.Popen(command, cwd=folder, env=environment(folder), start_new_session=True, **streams)


def in_a_terminal(folder: Path, *options: str) -> tuple[int, str]:
    """Run the demo in a terminal. Return (exit status, all that the terminal received)."""
    ours, its = pty.openpty()
    demo = start(folder, *options, smaller=True, stdin=its, stdout=its, stderr=its)
    os.close(its)
    received = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed: the demo has ended
            break
        received += piece
    os.close(ours)
    return demo.wait(30), received.decode()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    with forked_parents_of_kernels(folder / "IPYTHONDIR"):
        return *in_a_terminal(folder, "-n", "2", "--steps", "30"), folder


def test_the_loss_curve_continues_through_every_switch(demo: tuple[int, str, Path]) -> None:
    status, text, _ = demo
    apart = [float(found) for found in re.findall(r"largest difference ([\d.e+-]+)\.", text)]

    assert status == 0, text[-3000:]
    assert len(apart) == 1 and apart[0] <= 1e-8
    assert "The loss curve went on as if nothing had happened" in text
    assert re.search(r"30 steps under [2-6] strategies, loss [\d.]+ -> [\d.]+", text)


def test_each_switch_is_printed_with_predicted_and_measured_bytes(demo: tuple[int, str, Path]) -> None:
    text = demo[1].replace("\r\n", "\n")

    for old, new in (("dp=2", "dp=2 zero=3"), ("dp=2 zero=3", "tp=2"), ("pp=2 .*", "tp=2")):
        assert re.search(rf"{old} → {new}.* after step \d+\n +bytes moved +predicted \S+", text), (old, new)
    assert text.count("state identical") == 5


def test_one_live_line_is_updated_during_the_training(demo: tuple[int, str, Path]) -> None:
    steps = [int(step) for step in re.findall(r"\rtraining: step (\d+)/30 · loss [\d.]+ · \S+ tokens/s", demo[1])]

    assert len(steps) > 3
    assert not re.search(r"tokens/s[^\r]*\n", demo[1].replace("\r\n", "\n")), "the line stayed on the screen"


def test_the_demo_shows_generated_text_and_what_to_type_next(demo: tuple[int, str, Path]) -> None:
    text = demo[1].replace("\r\n", "\n")

    # After so few steps the model writes any bytes, also control characters that erase earlier text.
    assert re.search(r"It writes, spread over the ranks:\n {4}.*\S", text)
    assert "runs/demo.ipynb" in text
    assert "tensorboard --logdir runs" in text
    assert "nbkit lab" in text


def test_the_executed_notebook_and_the_curves_are_kept(demo: tuple[int, str, Path]) -> None:
    notebook = json.loads((demo[2] / "runs" / "demo.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (detached,) = [cell for cell in cells if "--detach" in "".join(cell["source"])]

    shown = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]

    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any("application/vnd.jupyter.widget-view+json" in data for data in shown)
    assert any("who holds" in data["text/plain"] or "%strategy --try" in data["text/plain"] for data in shown)
    # A detached cell keeps its output while other cells run: the last state of the line, not every state.
    printed = "".join(output.get("text", "") for output in detached["outputs"])
    assert "step 30/30 · loss" in printed
    assert printed.count("tokens/s") <= 3
    assert list((demo[2] / "runs").glob("*/events.out.tfevents.*"))


def test_the_demo_leaves_no_cluster_running(demo: tuple[int, str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(demo[2] / "NBKIT_HOME"))

    assert registry.entries() == []


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[None]:
    with forked_parents_of_kernels(tmp_path / "IPYTHONDIR"):
        yield


# One loop sets the same handler for both signals.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stopped_demo_leaves_nothing_running(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "NBKIT_HOME"))
    # A shell does this when it starts a command in the background.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        demo = start(
            *(tmp_path, "-n", "2", "--steps", "100000"), smaller=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("runs/*/events.out.tfevents.*")):  # it trains
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (entry,) = registry.entries()
    children = psutil.Process(demo.pid).children(recursive=True)

    demo.send_signal(number)
    said, _ = demo.communicate(timeout=60)

    assert demo.returncode == 130
    assert b"Stopped. Nothing is left running." in said
    assert registry.entries() == []
    psutil.wait_procs(children, timeout=10)
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert not any(process.is_alive() for process in (entry.controller, entry.parent, *entry.ranks))


def test_too_few_steps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    demo = start(tmp_path, "--steps", "1", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = demo.communicate(timeout=60)

    assert demo.returncode == 2
    assert b"at least 4 steps" in said
    assert not (tmp_path / "runs").exists()
