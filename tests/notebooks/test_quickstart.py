"""Test the first lesson, executed by nbclient in a fresh kernel with two CPU ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import end_clusters
from forked_parents import forked_parents_of_kernels

from nbkit.notebook.cluster import registry

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "00_quickstart.ipynb"
STEPS, MORE_STEPS = 30, 45
SMALL = (
    'CLUSTER = "-n 2 --cpu --ttl 10min"\n'
    f"STEPS, MORE_STEPS, BATCH, TEXT_BYTES = {STEPS}, {MORE_STEPS}, 4, 150_000"
)
ASK = "import json; print(json.dumps({'losses': losses, 'bigram': bigram}))"
SECONDS_PER_CELL = 120


def lesson() -> Any:
    # jsonschema would load a grammar of addresses in two seconds; no notebook needs it.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import nbformat  # not at the top, because every worker would import it

    return nbformat.read(NOTEBOOK, as_version=4)


def tagged(notebook: Any, tag: str) -> list[Any]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import nbclient
    import nbformat

    folder = tmp_path_factory.mktemp("lesson")
    notebook = lesson()
    (parameters,) = tagged(notebook, "parameters")
    parameters.source = SMALL
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
            patch.setenv(name, str(folder / name))
        resources = {"metadata": {"path": str(folder)}}
        client = nbclient.NotebookClient(notebook, timeout=SECONDS_PER_CELL, resources=resources)
        try:
            with forked_parents_of_kernels(folder / "IPYTHONDIR"):
                client.execute()
            yield notebook
        finally:
            # A cell that failed leaves its cluster behind.
            end_clusters(folder / "NBKIT_HOME")


def test_no_cell_fails(executed: Any) -> None:
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]

    assert [output for output in outputs if output.output_type == "error"] == []


def test_the_gradients_are_equal_on_all_ranks(executed: Any) -> None:
    (cell,) = tagged(executed, "equal")

    assert "[0-1] equal on all ranks: True" in text_of(cell)


def test_the_loss_falls_over_both_trainings(executed: Any) -> None:
    losses = json.loads(text_of(executed.cells[-1]))["losses"]

    assert len(losses) == STEPS + MORE_STEPS
    assert sum(losses[-20:]) / 20 < losses[0] - 2.0


def test_the_bigram_and_gpt_losses_are_printed_and_the_model_learned(executed: Any) -> None:
    (cell,) = tagged(executed, "verdict")
    bigram = json.loads(text_of(executed.cells[-1]))["bigram"]
    printed = text_of(cell)

    assert f"byte bigram {bigram:.3f} bits per byte, GPT " in printed
    assert float(printed.rpartition("GPT ")[2]) < 4.5  # 8 before; the full settings beat the bigram


def test_the_live_cell_runs_inside_the_training(executed: Any) -> None:
    (cell,) = tagged(executed, "live")
    step = int(text_of(cell).partition("step ")[2].partition(":")[0])

    assert STEPS <= step < STEPS + MORE_STEPS


def test_the_board_is_shown_with_its_link(executed: Any) -> None:
    (cell,) = tagged(executed, "board")

    assert "<iframe src='http://127.0.0.1:" in cell.outputs[0].data["text/html"]


def test_the_lesson_stops_its_cluster(executed: Any) -> None:
    assert registry.entries() == []
