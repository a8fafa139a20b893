"""Makes jobs.py importable here and in the processes of ranks.py; each test stands in a folder of its own."""

import sys
from pathlib import Path

import pytest

folder = str(Path(__file__).resolve().parent)
if folder not in sys.path:
    sys.path.insert(0, folder)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer writes to runs/ where it stands."""
    monkeypatch.chdir(tmp_path)
