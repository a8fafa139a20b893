"""Start JupyterLab and Chromium for all tests of this folder. See tests/support/jupyter_lab.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from clusters import end_clusters
from forked_parents import forked_parents_of_kernels
from jupyter_lab import CHROMIUM, LabPage, chromium, jupyter_lab


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH: sudo apt-get install chromium")
    pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield a running server, whose kernels start clusters of forked parents."""
    if find_spec("jupyterlab") is None:  # an import here would take seconds of a core
        pytest.skip("pip install jupyterlab")
    home = tmp_path_factory.mktemp("lab")
    with jupyter_lab(home) as server, forked_parents_of_kernels(home / "ipython"):
        yield server


@pytest.fixture(scope="package")
def lab_page(browser: Any, lab: dict[str, str]) -> Iterator[LabPage]:
    """Yield one page for all files: loading JupyterLab takes eight seconds of a core, opening another notebook less."""
    context = browser.new_context()
    yield LabPage(context.new_page(), lab)
    context.close()


@pytest.fixture(scope="module")
def open_page(lab_page: LabPage, lab: dict[str, str]) -> Iterator[Callable[[dict[str, Any]], LabPage]]:
    """Return a function: JSON of a notebook -> the page that shows it. Kernels and clusters end with the test file."""

    def open_page(notebook: dict[str, Any], name: str = "lesson.ipynb", height: int = 1000) -> LabPage:
        (Path(lab["root"]) / name).write_text(json.dumps(notebook))
        lab_page.page.set_viewport_size({"width": 1400, "height": height})
        lab_page.open(name)
        return lab_page

    yield open_page
    lab_page.close_all()
    lab_page.end_kernels()
    end_clusters(Path(lab["clusters"]))


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> None:
    """Give an idle kernel to a repeated test, whatever its first run left behind."""
    if getattr(request.node, "execution_count", 1) > 1 and "page" in request.fixturenames:
        page = request.getfixturevalue("page")
        if isinstance(page, LabPage):
            page.calm()
