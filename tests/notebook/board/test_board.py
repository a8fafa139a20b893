"""Test TensorBoard with real processes, event files and HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbkit.errors import BoardError
from nbkit.notebook.board import board as address
from nbkit.notebook.board.board import Board


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path_factory.mktemp("board") / "runs"
    writer = SummaryWriter(str(folder / "lesson-dp2"))
    for step in range(3):
        writer.add_scalar("train/loss", 3.0 - step, step)
    writer.close()
    return folder


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """End the board after the last test. Until then, each test reuses or replaces the board of the previous test."""
    yield
    Board.end()


def ask(port: int, path: str) -> object:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        return json.load(answer)


def runs_of(board: Board, expected: set[str]) -> set[str]:
    """Return the runs that TensorBoard knows. It reads files in the background, so wait for the `expected` ones."""
    deadline = time.monotonic() + 30
    while True:
        runs = ask(board.port, "data/runs")
        assert isinstance(runs, list)
        if set(runs) == expected or time.monotonic() > deadline:
            return set(runs)
        time.sleep(0.1)


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 15
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_the_board_serves_the_runs_of_its_log_directory(logdir: Path) -> None:
    board = Board.start(logdir)

    assert runs_of(board, {"lesson-dp2"}) == {"lesson-dp2"}
    points = ask(board.port, "data/plugin/scalars/scalars?run=lesson-dp2&tag=train%2Floss")
    assert [value for _, _, value in points] == [3.0, 2.0, 1.0]  # type: ignore[attr-defined]


def test_the_board_listens_on_loopback_only(logdir: Path) -> None:
    board = Board.start(logdir)

    family = [psutil.Process(board.pid), *psutil.Process(board.pid).children(recursive=True)]
    listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_the_same_log_directory_reuses_the_board_and_another_one_replaces_it(logdir: Path, tmp_path: Path) -> None:
    first = Board.start(logdir)
    again = Board.start(str(logdir), height=300)
    assert again.pid == first.pid
    assert "height='300'" in again._repr_html_()

    other = Board.start(tmp_path / "elsewhere")

    assert not psutil.pid_exists(first.pid)
    assert "ended" in repr(first)
    assert ask(other.port, "data/environment")["data_location"] == str(tmp_path / "elsewhere")  # type: ignore[index]


@pytest.mark.long
def test_a_killed_board_is_started_again(logdir: Path) -> None:
    first = Board.start(logdir)
    psutil.Process(first.pid).kill()
    while first.is_alive():  # the system takes a moment to end all its threads
        time.sleep(0.02)

    again = Board.start(logdir)

    assert again.pid != first.pid
    assert runs_of(again, {"lesson-dp2"}) == {"lesson-dp2"}


def test_the_board_ends_with_its_notebook_even_if_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import threading, time
from nbkit import Board
# In a thread that ends at once, as notebook front ends do: the board must outlive the thread, not the process.
def start(): print(Board.start({str(tmp_path)!r}).pid, flush=True)
thread = threading.Thread(target=start); thread.start(); thread.join()
time.sleep(60)
"""
    notebook = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert notebook.stdout is not None
        pid = int(notebook.stdout.readline())
        board = psutil.Process(pid)
        family = [pid, *(child.pid for child in board.children(recursive=True))]
        time.sleep(1.2)
        assert board.is_running()
    finally:
        notebook.kill()
        notebook.wait()
        if notebook.stdout is not None:
            notebook.stdout.close()

    assert all(wait_until_gone(pid) for pid in family)


def test_a_broken_plugin_does_not_prevent_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "site" / "broken_plugin-1.0.dist-info"
    broken.mkdir(parents=True)
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[tensorboard_plugins]\nbroken = no_such_module:Plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    assert Board.start(tmp_path / "runs").is_alive()


def test_a_failed_start_shows_the_error_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise RuntimeError('numpy is too old')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(BoardError, match="numpy is too old") as error:
        Board.start(tmp_path / "runs")

    assert error.value.what == "TensorBoard did not start."
    assert Board.end() == "This notebook has no TensorBoard."


def test_without_tensorboard_the_error_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(BoardError, match="pip install tensorboard"):
        Board.start(tmp_path)


def test_a_log_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.txt").touch()

    with pytest.raises(BoardError, match="is a file"):
        Board.start(tmp_path / "log.txt")


def test_the_board_shows_a_link_an_ssh_command_and_a_frame(tmp_path: Path) -> None:
    board = Board.start(tmp_path)
    page, text = board._repr_html_(), repr(board)
    assert "ends with this kernel: then <code>%board</code> again" in page  # a saved frame is empty then

    assert f"<iframe src='http://127.0.0.1:{board.port}/?" in page
    assert f"<a href='http://127.0.0.1:{board.port}/?" in page
    assert f"<a href='http://127.0.0.1:{board.port}/#communication'" in page
    assert f"ssh -L {board.port}:127.0.0.1:{board.port} " in page
    assert f"http://127.0.0.1:{board.port}/" in text
    assert f"ssh -L {board.port}:127.0.0.1:{board.port} " in text
    assert str(tmp_path) in text
    assert "not there yet" not in text + page
    assert (
        "not there yet" in repr(Board.start(tmp_path / "runs"))
        and "not there yet" in Board.start(tmp_path / "runs")._repr_html_()
    )


@pytest.mark.parametrize(
    ("environment", "base_url", "url"),
    [
        ({}, "", "http://127.0.0.1:6007/"),
        ({}, "/lab-of-ann/", "/lab-of-ann/proxy/6007/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ann/"}, "", "/user/ann/proxy/6007/"),
        ({"VSCODE_PROXY_URI": "https://x.example/proxy/{{port}}"}, "", "https://x.example/proxy/6007/"),
        (
            {"CODESPACE_NAME": "blue-tree", "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.example"},
            "",
            "https://blue-tree-6007.app.example/",
        ),
        ({"CODESPACE_NAME": "blue-tree"}, "", "http://127.0.0.1:6007/"),
        ({"TENSORBOARD_PROXY_URL": "https://x.example/p/%PORT%"}, "", "https://x.example/p/6007/"),
        ({"TENSORBOARD_PROXY_URL": "/p/%PORT%/", "JUPYTERHUB_SERVICE_PREFIX": "/user/ann/"}, "", "/p/6007/"),
    ],
)
def test_the_address_behind_a_server_goes_through_that_server(
    environment: dict[str, str], base_url: str, url: str
) -> None:
    assert address.browser_url(6007, environment, base_url) == url


def test_in_colab_the_page_asks_colab_for_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not address.in_colab({})
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    page = Board.start(tmp_path)._repr_html_()

    assert "google.colab.kernel.proxyPort(" in page and "#timeseries" in page
    assert "127.0.0.1" not in page


def test_other_way_names_the_tool_that_forwards_the_port() -> None:
    assert "pip install jupyter-server-proxy" in address.other_way(6007, {"JUPYTERHUB_SERVICE_PREFIX": "/user/ann/"})
    assert "ssh -L 6007:127.0.0.1:6007 " in address.other_way(6007, {})


def test_the_servers_base_url_is_read_from_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jpserver-41.json").write_text(json.dumps({"base_url": "/lab-of-ann/"}))
    environment = {"JPY_PARENT_PID": "41"}
    assert address.server_base_url(environment, tmp_path) == ""  # without jupyter-server-proxy, it forwards no ports

    monkeypatch.setattr("importlib.util.find_spec", lambda name: os)

    assert address.server_base_url(environment, tmp_path) == "/lab-of-ann/"
    assert address.server_base_url({"JPY_PARENT_PID": "42"}, tmp_path) == ""
    assert address.server_base_url({}, tmp_path) == ""
