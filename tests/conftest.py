"""Makes tests/support and tests/models importable, here and in the processes that the tests start; shares the work."""

import sys
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parent
for folder in (_TESTS / "models", _TESTS / "support", _TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files, as `--dist loadfile`; those of the browser on one worker: each of them alone fills the machine."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/browser" if file.startswith("tests/browser/") else file

    return Scheduling(config, log)
