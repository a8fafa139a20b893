"""Test ranks on nodes with GPUs: Slurm gives each rank one, and a request for too many gets a hint that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_nodes import SlurmNodes
from waiting import until

from magics.cluster import options_of
from nbkit import Cluster
from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmLauncher, SlurmRequest, read_nodes, size_of
from nbkit.notebook.cluster.hosts.start_options import requested


def test_a_job_requests_a_gpu_per_rank_and_gets_them(slurm: SlurmNodes, tmp_path: Path) -> None:
    job = SlurmLauncher(SlurmRequest(4, partition="gpu"), tmp_path)
    assert (job.size.nodes, job.size.ranks, job.size.gpus) == (2, 2, 2)
    said = tmp_path / "said"
    words = [word for word in job._words() if not word.startswith("--output")]
    wrapped = "--wrap=srun sh -c 'echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES'"
    number = slurm.command("sbatch", "--parsable", *words, f"--output={said}", wrapped).strip()
    until(lambda: not any(line.startswith(f"{number} ") for line in slurm.jobs()), 30)
    assert sorted(said.read_text().split()) == ["g1:0,1", "g2:0,1"]


def test_a_request_for_more_gpus_than_a_node_has_gets_a_hint_that_fits(slurm: SlurmNodes) -> None:
    with pytest.raises(UsageError, match="The nodes of the partition gpu have fewer than 4 GPUs") as caught:
        size_of(SlurmRequest(4, nodes=1, partition="gpu"), read_nodes())
    assert caught.value.numbers == "-n 4 on 1 node; gpu has 2 nodes of 2 GPUs"
    fitting = requested(options_of(f"start --slurm --partition gpu {caught.value.hint.partition('   or')[0]}"))
    assert isinstance(fitting, SlurmRequest) and size_of(fitting, read_nodes())[0].gpus == 2
    with pytest.raises(UsageError, match="too small for 5 ranks"):
        size_of(SlurmRequest(5, partition="gpu"), read_nodes())


@pytest.mark.parametrize("more", ["", " --detach"])
def test_a_list_of_gpus_is_refused_for_slurm(more: str) -> None:
    with pytest.raises(UsageError, match="GPUs are not listed") as caught:
        requested(options_of(f"start --slurm -n 2 --gpus 0,1{more}"))
    assert "--gpus 0,1" in caught.value.numbers


def test_nodes_with_unusable_gpus_are_an_error_and_leave_no_job(slurm: SlurmNodes) -> None:
    with pytest.raises(ClusterError, match="Slurm has given 1 GPU of a host, and no NVIDIA GPU") as caught:
        Cluster.start(name="fakes", on=SlurmRequest(2, nodes=2, partition="gpu"))
    assert "--cpu" in caught.value.hint and "CUDA_VISIBLE_DEVICES='0'" in caught.value.numbers
    until(lambda: not slurm.jobs(), 10)
