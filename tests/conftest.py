"""Makes tests/support and tests/models importable, here and in the processes that the tests start; shares the work."""

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
for folder in (_TESTS / "models", _TESTS / "support", _TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# What starts kernels, clusters and browsers waits much and runs long: last, it would leave one worker alone at the end.
# So it comes first, the longest before the rest, and then the many files of ranks that compute.
_LONG = (
    "machines",
    "browser",
    "commands",
    "notebooks",
    "magics",
    "parity",
    "bench",
    "test_docs.py",
    "notebook",
    "bridge",
    "notebook/cluster",
    "rank/train",
    "rank/world",
    "rank/telemetry",
    "rank/parallel",
    "rank",
)


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A process group that a test leaves in this process would be the world of all that come after it."""
    yield
    module = sys.modules.get("nbkit.rank.world.world")
    if module is not None and (world := module.current()) is not None:
        world.leave()
        pytest.fail("This test leaves a world in the tests' own process. Let ranks make it:   run_ranks(fn, 1)")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers fork their ranks from one process."""
    import ranks

    node.workerinput["ranks"] = ranks.shared_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="show what each file takes, in CPU-seconds of all processes")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: _end(config))
    if hasattr(config, "workerinput"):
        import ranks

        ranks.use_server(config.workerinput["ranks"])
        if (failures := getattr(config, "failures_db", None)) is not None and hasattr(failures, "sock"):
            # `--reruns`: a worker tells and asks of each test, and would wait 40 ms between them for an acknowledgment.
            failures.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if config.getoption("--cpu") and not hasattr(config, "workerinput"):
        from cpu_seconds import CpuSeconds

        config.pluginmanager.register(CpuSeconds())


def _end(config: pytest.Config) -> None:
    """A run that is ended from outside, as by `timeout`, leaves no cluster: fixtures are torn down as at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # by which workers are hurried
    if config.pluginmanager.hasplugin("dsession"):
        for worker in psutil.Process().children():
            worker.terminate()
    pytest.exit("ended by SIGTERM", returncode=128 + signal.SIGTERM)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What failed before it was run again: of the last attempt alone nobody learns why the first one failed."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed at first: {report.nodeid}", sep="_")
        terminalreporter.line(report.longreprtext)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The folders that take long come first, where several workers share the tests."""
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(_TESTS).as_posix()
    named = [name for name in _LONG if f"{path}/".startswith(f"{name}/")]
    return _LONG.index(max(named, key=len)) if named else len(_LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker for each file, as `--dist loadfile`, and for each package, whose files share a browser or a cluster."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            shared = folder != "tests" and (config.rootpath / folder / "__init__.py").exists()
            return folder if shared else file

    config.option.loadscopereorder = False  # in the order that the workers have collected
    return Scheduling(config, log)
