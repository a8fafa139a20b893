"""The options of `%cluster start` that say where ranks run, and those that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from magics.arguments import cluster_parser, parse
from magics.cluster import options_of
from nbkit.errors import UsageError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.hosts.launcher import LauncherRequest, StartRequest, loaded, saved
from nbkit.notebook.cluster.hosts.launchers.mpi import MpiRequest
from nbkit.notebook.cluster.hosts.launchers.slurm import AllocationRequest, SlurmRequest
from nbkit.notebook.cluster.hosts.launchers.ssh import SshRequest
from nbkit.notebook.cluster.hosts.start_options import requested


def asked(line: str, *rest: str) -> StartRequest | None:
    options = parse(cluster_parser(), f"start {line}")
    options.rest = rest
    return requested(options)


def started(line: str) -> StartRequest | None:
    return requested(options_of(line))


def test_options_become_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("-n 2 --cpu") is None
    assert asked("") is None
    found = asked("--slurm -n 8 --nodes 2 --partition gpu --time 1:00:00", "--mem=4G")
    assert found == SlurmRequest(8, 2, "gpu", "1:00:00", options=("--mem=4G",))
    assert asked("--slurm -n 8 --detach --save-before 10min") == SlurmRequest(8, save_before=600)
    assert asked("--slurm -n 8").save_before == 120  # type: ignore[union-attr]
    assert asked("--slurm -n 8 --requeue") == SlurmRequest(8, requeue=True)
    with pytest.raises(UsageError, match="--requeue is for --slurm"):
        asked("-n 2 --requeue")
    with pytest.raises(UsageError, match="--detach is for --slurm or --launcher"):
        asked("-n 2 --detach")
    assert asked("--launcher lsf -n 8 --nodes 2 --detach", "-q", "gpu") == LauncherRequest(
        "lsf", 8, 2, options=("-q", "gpu")
    )
    assert asked("--launcher slurm -n 8 --partition gpu") == asked("--slurm -n 8 --partition gpu")
    with pytest.raises(UsageError, match="What follows -- is for --mpi or --slurm or --launcher") as caught:
        asked("-n 2", "-q", "gpu")
    assert caught.value.numbers == "-q gpu"
    assert asked("--hosts node1:2,node2 --cpu") == SshRequest((("node1", 2), ("node2", 1)), cpu=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert asked("--cpu") == AllocationRequest("7", (2, 2), cpu=True)
    assert asked("-n 2") is None  # beside the notebook, as everywhere


def test_mpirun_starts_on_hosts_of_the_line_of_the_batch_job_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked("--mpi -n 3 --cpu") == MpiRequest((("localhost", 3),), cpu=True)
    assert asked("--mpi --hosts a:2,b:1", "--tag-output") == MpiRequest((("a", 2), ("b", 1)), options=("--tag-output",))
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert asked("--mpi") == MpiRequest((("n1", 2), ("n2", 2)))
    assert asked("--mpi -n 2") == MpiRequest((("n1", 1), ("n2", 1)))
    with pytest.raises(UsageError, match="The hosts say how many"):
        asked("--mpi -n 3")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("-n 2 --nodes 2", "--nodes is for --slurm"),
        ("--slurm --hosts a:1", "One launcher starts the ranks"),
        ("--slurm", "How many ranks shall Slurm start"),
        ("--mpi", "How many ranks shall mpirun start"),
        ("--mpi --slurm -n 2", "One launcher starts the ranks"),
        ("--mpi --hosts a:1 -n 2", "The hosts say how many"),
        ("--slurm -n 2 --gpus 0,1", "GPUs are not listed"),
        ("--hosts a:1 -n 2", "--hosts says how many ranks"),
        ("-n 2 --python /bin/python", "--python is for other hosts"),
        ("-n 2 --container 'apptainer exec a.sif'", "--container is for other hosts"),
        ("--hosts a:1 --container=--container-image=a", "options of srun, which does not"),
        ("--slurm -n 2 --gpus 0,1 --detach", "GPUs are not listed"),
        ("--slurm -n 0", "at least one rank"),
        ("--mpi -n 2 --nodes 2", "--nodes is for --slurm or --launcher"),
        ("--launcher lsf -n 2 --partition gpu", "--partition is for --slurm"),
        ("--launcher lsf -n 2 --hosts a:1", "One launcher starts the ranks"),
        ("--launcher lsf -n 2 --gpus 0,1", "GPUs are not listed"),
        ("--launcher step", "does not run in a Slurm allocation"),
    ],
)
def test_what_does_not_go_together_is_said(line: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        asked(line)


def test_a_cluster_that_a_file_describes_is_started_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, project = tmp_path / "user.toml", tmp_path / "project.toml"
    monkeypatch.setattr(site_settings, "files", lambda: (tmp_path / "none", user, project))
    user.write_text('[clusters]\nlab = "--slurm -n 16 --partition gpu -- --account=lab"\ndesk = "--hosts a:1"\n')
    project.write_text('[clusters]\ndesk = "--hosts a:2,b:2"\nbare = "-- --mem=4G"\n')

    assert started("start --on lab") == SlurmRequest(16, None, "gpu", options=("--account=lab",))
    typed = started("start --on lab -n 4 --time 5:00 -- --mem=1G")
    assert typed == SlurmRequest(4, None, "gpu", "5:00", options=("--account=lab", "--mem=1G"))
    assert started("start --on desk") == SshRequest((("a", 2), ("b", 2)))
    assert started("start --on bare --slurm -n 2") == SlurmRequest(2, options=("--mem=4G",))
    with pytest.raises(UsageError, match="called 'attic'") as refused:
        started("start --on attic")
    assert "lab, desk, bare" in refused.value.numbers and str(user) in refused.value.hint
    project.write_text('clusters = "--slurm"\n')
    with pytest.raises(UsageError, match=r"project\.toml cannot be used"):
        started("start --on lab")


def test_a_request_is_kept_as_json_takes_it() -> None:
    for request in (
        SlurmRequest(4, options=("-A", "x")),
        SshRequest((("a", 2),)),
        MpiRequest((("a", 2),)),
        AllocationRequest("7", (1, 2)),
        LauncherRequest("pbs", 4, nodes=2, options=("-q", "gpu"), spares=1),
    ):
        assert loaded(saved(request)) == request


def test_a_request_of_another_release_is_read_without_the_fields_that_this_one_does_not_have() -> None:
    request = SshRequest((("a", 2), ("b", 2)), spares=1)
    assert loaded({**saved(request), "spare_hosts": 1}) == request


def test_devices_in_reserve_are_part_of_a_request_and_not_fewer_than_none() -> None:
    found = asked("-n 4 --hosts a:2,b:2 --spares 1")
    assert found == SshRequest((("a", 2), ("b", 2)), spares=1)
    with pytest.raises(UsageError) as caught:
        asked("--slurm -n 4 --spares -1")
    assert caught.value.numbers == "--spares -1" and caught.value.hint == "--spares 1"
