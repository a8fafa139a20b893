"""Test a container for ranks of other hosts: words before the agent's command, here a wrapper that changes the root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magics.cluster import options_of
from nbkit import Cluster
from nbkit.notebook.cluster.hosts.launcher import agent_command, loaded, saved
from nbkit.notebook.cluster.hosts.start_options import requested

WRAPPER = Path(__file__).resolve().parents[1] / "support" / "change_root.sh"


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "line"), [("slurm", "--slurm -n 2 --nodes 2"), ("ssh", "--hosts {0}:1,{1}:1")])
def test_ranks_run_in_the_container_and_leave_nothing_behind(
    request: pytest.FixtureRequest, launcher: str, line: str
) -> None:
    hosts: Any = request.getfixturevalue(launcher)
    names = hosts.names if launcher == "ssh" else ()
    on = requested(options_of(f"start {line.format(*names)} --cpu --container {WRAPPER}"))
    cluster = Cluster.start(name="boxed", on=on, ttl=600)
    try:
        inside = "open('/mnt/image').read().strip(), int(dist.all_reduce(x := torch.ones(1)) or x)"
        assert cluster.run(f"[{inside}]").values == {rank: ["the image", 2] for rank in range(2)}
    finally:
        cluster.stop()
    assert not Path("/mnt/image").exists()


@pytest.mark.long
def test_options_of_pyxis_are_passed_to_srun() -> None:
    words = "--container-image=torch.sqsh --no-container-mount-home"
    found = requested(options_of(f"start --slurm -n 2 --container '{words}'"))
    assert found is not None and loaded(saved(found)) == found
    assert agent_command(found)[:2] == words.split() and agent_command(found)[-2] == "-m"
