"""Test a notebook on a JupyterHub: links go through the Hub's proxy, and clusters outlive the notebook server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import jupyter_hub
import pytest
from jupyter_hub import JupyterHub
from slurm_nodes import SlurmNodes

from nbkit.notebook.cluster import registry

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def hub(slurm: SlurmNodes, nbkit_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterHub]:
    if why := jupyter_hub.missing():
        pytest.skip(why)
    environment = {**slurm.environment, "PYTHONPATH": str(ROOT), "NBKIT_HOME": os.environ["NBKIT_HOME"]}
    with jupyter_hub.running(tmp_path_factory.mktemp("hub"), environment) as found:
        yield found


def test_tensorboard_is_reached_through_the_hubs_proxy_and_ends_with_the_server(hub: JupyterHub) -> None:
    hub.start_server()
    shown = hub.kernel().run("%load_ext nbkit\n%board .")
    (link,) = set(re.findall(rf"/user/{jupyter_hub.USER}/proxy/\d+/", shown))
    assert "127.0.0.1" not in shown  # in the user's browser, this would be the user's own machine
    assert b"TensorBoard" in hub.get(link)
    assert b"scalars" in hub.get(f"{link}data/plugins_listing")
    hub.stop_server()
    assert not hub.answers(link)


def test_a_slurm_cluster_outlives_the_server_and_can_be_attached_in_the_next(
    hub: JupyterHub, slurm: SlurmNodes
) -> None:
    hub.start_server()
    kernel = hub.kernel()
    kernel.run("%load_ext nbkit\n%cluster start --name hub --slurm -n 2 --nodes 2 --cpu")
    kernel.run("%%distributed\nkept = 40 + rank")
    hub.stop_server()
    (job,) = slurm.jobs()
    assert job.endswith("RUNNING")
    hub.start_server()
    kernel = hub.kernel()
    kernel.run("%load_ext nbkit\n%cluster attach hub")
    assert "[40, 41]" in kernel.run(
        "%pull kept --rank 1\nimport nbkit\nfrom nbkit.notebook.cluster.cluster import current\n"
        "print(list(current().run('kept').values.values()))"
    )
    kernel.run("%cluster stop")
    assert registry.find("hub") is None
    hub.stop_server()
