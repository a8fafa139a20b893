"""Make tests/support importable, here and in the processes that the tests start; share the work."""

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_TESTS = Path(__file__).resolve().parent
for folder in (_TESTS / "support", _TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


_WAITING = {
    "notebook/cluster": 200,
    "bridge": 150,
    "browser": 110,
    "machines": 100,
    "magics": 90,
    "test_docs.py": 50,
    "commands/test_demo.py": 50,
    "notebooks": 30,
    "test_private_symbols.py": 20,
    "commands": 15,
    "test_layering.py": 5,
    "test_hints.py": 5,
    "notebook": 4,
}
"""Packages and files that start kernels, clusters and browsers -> about how many seconds each one takes.

These tests mostly wait. So they take turns with the tests of ranks, which compute; the longest come first."""
_COMPUTING = ("rank/", "verify/", "bench/")


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """Fail a test that leaves a process group in this process: it would be the world of all later tests."""
    yield
    module = sys.modules.get("nbkit.rank.world.world")
    if module is not None and (world := module.current()) is not None:
        world.leave()
        pytest.fail("This test leaves a world in the tests' own process. Let ranks make it:   run_ranks(fn, 1)")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all workers fork their ranks from one process."""
    import ranks

    node.workerinput["ranks"] = ranks.shared_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="show what each file takes, in CPU-seconds of all processes")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: _end(config))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell ignores it in a background command. Tests of the stop button send this signal.
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        import ranks

        ranks.use_server(config.workerinput["ranks"])
        if (failures := getattr(config, "failures_db", None)) is not None and hasattr(failures, "sock"):
            # With `--reruns`, a worker sends two messages per test, and would wait 40 ms between them.
            failures.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if config.getoption("--cpu") and not hasattr(config, "workerinput"):
        from cpu_seconds import CpuSeconds

        config.pluginmanager.register(CpuSeconds())


def _end(config: pytest.Config) -> None:
    """End the run as Ctrl-C does, so that fixtures are torn down and no cluster is left, also under `timeout`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would kill the workers
    if config.pluginmanager.hasplugin("dsession"):
        for worker in psutil.Process().children():
            worker.terminate()
    pytest.exit("ended by SIGTERM", returncode=128 + signal.SIGTERM)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the first failure of each test that was run again: the last failure alone can hide its cause."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed at first: {report.nodeid}", sep="_")
        terminalreporter.line(report.longreprtext)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests for several workers: tests that wait and tests that compute take turns."""
    if hasattr(config, "workerinput"):
        of_item = {item: _unit(item.path.relative_to(_TESTS)) for item in items}
        places = _places(list(dict.fromkeys(of_item.values())))
        items.sort(key=lambda item: places[of_item[item]])


def _unit(path: Path) -> str:
    """Return the file or folder that one worker runs as a whole, for a file below this folder.

    It is the file itself, or its package if it has one: the files of a package share a browser or a cluster.
    """
    package = path.parent != Path() and (_TESTS / path.parent / "__init__.py").exists()
    return (path.parent if package else path).as_posix()


def _places(units: list[str]) -> dict[str, float]:
    """Return the place of each unit in the order of the run, from 0 (first) to 1 (last)."""
    seconds: dict[str, int] = {}
    for unit in units:
        if named := [name for name in _WAITING if f"{unit}/".startswith(f"{name}/")]:
            seconds[unit] = _WAITING[max(named, key=len)]
    places, before = {}, 0.0
    for unit in sorted(seconds, key=lambda unit: -seconds[unit]):
        places[unit] = (
            0.9 * before / sum(seconds.values())
        )  # at the very end one worker would wait while the others are idle
        before += seconds[unit]
    computing = [unit for unit in units if unit.startswith(_COMPUTING) and unit not in seconds]
    places |= {unit: number / len(computing) for number, unit in enumerate(computing)}
    return dict.fromkeys(units, 1.0) | places  # the others are fast


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, as `--dist loadfile`, or its whole package, which shares a browser or a cluster."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = config.rootpath / super()._split_scope(nodeid)
            return _unit(file.relative_to(_TESTS))

    config.option.loadscopereorder = False  # in the order that the workers have collected
    return Scheduling(config, log)
