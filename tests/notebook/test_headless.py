"""Test notebooks without a browser, in real kernels."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from forked_parents import forked_parents_of_kernels

from nbkit.errors import CellError, NbkitError
from nbkit.notebook.cluster import registry
from nbkit.notebook.headless import Headless, read_notebook, shown_by, tagged, text_of


def notebook_of(*sources: str) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(sources)
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def silent(cell: dict[str, Any], text: str) -> None:
    return


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_outputs_are_stored_in_the_notebook_and_text_is_reported_at_once(tmp_path: Path) -> None:
    notebook = notebook_of(
        "print('one'); print('two')",
        "from IPython.display import HTML, display\nhandle = display('old', display_id=True)\nHTML('<b>3</b>')",
        "handle.update('new')\nimport os; os.getcwd()",
    )
    heard: list[tuple[str, str]] = []

    with Headless(tmp_path, lambda cell, text: heard.append((cell["id"], text))) as kernel:
        kernel.run(notebook)

    first, second, third = notebook["cells"]
    assert text_of(first) == "one\ntwo\n"
    assert "".join(text for cell, text in heard if cell == "c0") == "one\ntwo\n"
    assert [output["output_type"] for output in second["outputs"]] == ["display_data", "execute_result"]
    assert second["outputs"][0]["data"]["text/plain"] == "'new'"
    assert second["outputs"][1]["data"]["text/html"] == "<b>3</b>"
    assert third["outputs"][0]["data"]["text/plain"] == repr(str(tmp_path))
    assert [cell["execution_count"] for cell in notebook["cells"]] == [1, 2, 3]


def test_only_the_last_state_of_a_rewritten_line_is_kept(tmp_path: Path) -> None:
    notebook = notebook_of(
        "import time\nfor i in range(5):\n    print(f'\\rat {i}', end='', flush=True); time.sleep(0.02)\n"
        "print('\\rdone')"
    )

    with Headless(tmp_path, silent) as kernel:
        kernel.run(notebook)

    assert text_of(notebook["cells"][0]) == "done\n"


def test_a_failing_cell_ends_the_run_and_its_cluster(tmp_path: Path) -> None:
    notebook = notebook_of(
        "%load_ext nbkit\n%cluster start -n 1 --cpu --ttl 30", "%%distributed\nprint('now')\n1 / 0", "print('never')"
    )

    forked = forked_parents_of_kernels(tmp_path / "IPYTHONDIR")
    with forked, pytest.raises(CellError) as error, Headless(tmp_path, silent) as kernel:
        try:
            kernel.run(notebook)
        finally:
            assert len(registry.entries()) == 1

    assert error.value.what == "Code cell 2 of the notebook failed: %%distributed"
    assert "now" in error.value.numbers
    assert "ZeroDivisionError" in error.value.numbers
    assert "\x1b" not in str(error.value)
    assert notebook["cells"][2]["execution_count"] is None
    assert registry.entries() == []


def test_a_kernel_that_dies_is_an_error(tmp_path: Path) -> None:
    notebook = notebook_of("import os; os.kill(os.getpid(), 9)")

    with pytest.raises(NbkitError, match="has died"), Headless(tmp_path, silent) as kernel:
        kernel.run(notebook)


@pytest.mark.parametrize("deep", [False, True])
def test_a_kernel_uses_ipc_sockets_unless_their_path_is_too_long(
    deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.gettempdir()) if not deep else tmp_path / ("a" * 100)
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    left = set(folder.glob("nbkit-*"))
    notebook = notebook_of("import ipykernel", "ipykernel.get_connection_info(unpack=True)['transport']")

    with Headless(tmp_path, silent) as kernel:
        kernel.run(notebook)
        own = set(folder.glob("nbkit-*/kernel.json"))

    assert shown_by(notebook["cells"][1]) == repr("tcp" if deep else "ipc")
    assert own and not any(path.exists() for path in own if path.parent not in left)


def test_cells_are_found_by_their_tag() -> None:
    notebook = notebook_of("1", "2")
    notebook["cells"][1]["metadata"]["tags"] = ["second"]

    assert [cell["source"] for cell in tagged(notebook, "second")] == ["2"]


def test_a_missing_notebook_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NbkitError, match=r"none\.ipynb cannot be read"):
        read_notebook(tmp_path / "none.ipynb")
