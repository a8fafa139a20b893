"""README's cells run as they stand, one after the other, in one real kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import end_clusters
from jupyter_client.manager import start_new_kernel

README = Path(__file__).resolve().parents[1] / "README.md"
SECONDS_PER_CELL = 120


def cells() -> list[str]:
    """The fenced blocks marked python or ipython; each is one cell. What is not to be run is marked otherwise."""
    return re.findall(r"^```i?python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    manager, client = start_new_kernel(env=dict(os.environ), cwd=str(tmp_path))
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        # A cell that failed half-way leaves its cluster behind.
        end_clusters(tmp_path / "NBKIT_HOME")


def run(client: Any, source: str) -> str:
    """Run one cell; "" if it went well, else all that it showed."""
    shown: list[str] = []

    def show(message: dict[str, Any]) -> None:
        content = message["content"]
        shown.append(content.get("text") or "\n".join(content.get("traceback", ())) or "")

    reply = client.execute_interactive(source, output_hook=show, timeout=SECONDS_PER_CELL)
    return "" if reply["content"]["status"] == "ok" else "".join(shown) or str(reply["content"])


@pytest.mark.timeout(600)
def test_every_cell_of_readme_runs_from_top_to_bottom(kernel: Any) -> None:
    sources = cells()
    assert sources, "README has no ```python block"

    for number, source in enumerate(sources, 1):
        problem = run(kernel, source)
        assert not problem, f"cell {number} of README failed:\n{source}\n{problem}"


def test_a_failing_cell_is_seen(kernel: Any) -> None:
    assert run(kernel, "1 + 1") == ""
    assert "ZeroDivisionError" in run(kernel, "print('before')\n1 / 0")
