"""Test the memory that a rank can still use, by the machine, its cgroups, and its own limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import quiet
from ranks import run_ranks

from nbkit.errors import UsageError
from nbkit.rank import host_memory
from nbkit.rank.parallel.reshard.redistribute import ROUND_BYTES
from nbkit.rank.telemetry.health import bytes_held
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.run_recorder import Recorder

CPU = torch.device("cpu")
GB = 1 << 30


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_ranks_of_a_node_share_the_free_memory_of_machine_or_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBKIT_MEMORY_LIMIT", raising=False)
    for machine, group, two in ((8 * GB, None, 4 * GB), (8 * GB, 6 * GB, 3 * GB), (None, None, None)):
        monkeypatch.setattr(host_memory, "of_machine", lambda free=machine: free)
        monkeypatch.setattr(host_memory, "of_cgroups", lambda free=group: free)

        assert free_memory.left(CPU, ranks=2) == two


def test_the_tightest_cgroup_of_version_2_counts_without_cached_files(tmp_path: Path) -> None:
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    written(proc / "self", cgroup="0::/job/step\n")
    written(top / "job" / "step", memory__max="max\n", memory__current=f"{GB}\n")
    written(
        top / "job",
        memory__max=f"{8 * GB}\n",
        memory__current=f"{6 * GB}\n",
        memory__stat=f"anon 7\ninactive_file {GB}\n",
    )
    written(top, memory__max=f"{100 * GB}\n", memory__current=f"{7 * GB}\n")

    assert host_memory.of_cgroups(proc, top) == 3 * GB


def test_cgroups_of_version_1_are_read_even_if_a_containers_path_is_not_mounted(tmp_path: Path) -> None:
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    written(proc / "self", cgroup="5:cpu,cpuacct:/\n4:memory:/docker/abc\n")
    written(
        top / "memory",
        memory__limit_in_bytes=f"{4 * GB}\n",
        memory__usage_in_bytes=f"{3 * GB}\n",
        memory__stat="cache 5\ntotal_inactive_file 4096\n",
    )

    assert host_memory.of_cgroups(proc, top) == GB + 4096
    written(top / "memory", memory__limit_in_bytes="9223372036854771712\n")
    assert host_memory.of_cgroups(proc, top) is None


def test_the_memory_limit_of_a_rank_counts_from_its_held_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBKIT_MEMORY_LIMIT", str(bytes_held()[0] + (96 << 20)))
    found = free_memory.left(CPU, ranks=1)

    assert found is not None and (64 << 20) < found < (128 << 20)
    monkeypatch.setenv("NBKIT_MEMORY_LIMIT", "1")
    assert free_memory.left(CPU, ranks=1) == 0
    monkeypatch.setenv("NBKIT_MEMORY_LIMIT", "8GB")
    with pytest.raises(UsageError, match="number of bytes"):
        free_memory.left(CPU, ranks=1)


@pytest.mark.parametrize(
    ("spare", "size"),
    [(None, 24), (-1000, 24), (0, 24), (8 * 48 - 1, 24), (8 * 48, 48), (8 * 96 - 1, 48), (8 * 768, 768), (10**6, 768)],
)
def test_a_round_on_a_gpu_uses_at_most_a_quarter_of_the_spare_memory(
    spare: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = 5 * GB
    free = None if spare is None else new + (spare << 20)

    assert free_memory.round_bytes(new, CPU, free=free) == ROUND_BYTES
    monkeypatch.setattr(free_memory, "accelerator", lambda: SimpleNamespace(holds=lambda device: True))
    found = free_memory.round_bytes(new, CPU, free=free)
    assert found == size << 20
    assert spare is None or size == 24 or 2 * found <= (spare << 20) / 4


def room_beside(job: Any, spare: int) -> bool:
    """Return True if a step has room when `spare` bytes are left, whatever else this machine does."""
    with pytest.MonkeyPatch.context() as patch:
        for one in ("of_machine", "of_cgroups"):
            patch.setattr(host_memory, one, lambda: None)
        patch.setenv("NBKIT_MEMORY_LIMIT", str(bytes_held()[0] + spare))
        return free_memory.roomy(job.device, job.recorder.peak_bytes)


def with_limits(world: object) -> list[bool]:
    job: Any = SimpleNamespace(device=CPU, recorder=Recorder(CPU))
    peak = bytes_held()[1]
    return [room_beside(job, spare) for spare in (2 * peak, peak // 2)]


def test_a_step_has_room_if_the_spare_memory_exceeds_the_peak() -> None:
    assert run_ranks(with_limits, 1) == [[True, False]]


def after_a_count(world: object, folder: str) -> list[bool]:
    trainer = quiet(log_dir=folder)
    torch.ones(512 << 18)  # 512 MB, freed at once
    before = bytes_held()[1]
    trainer.fit(3)
    after = bytes_held()[1]
    found = [room_beside(trainer.job, spare) for spare in (2 * before, (before + after) // 2)]
    return [after < before - (256 << 20), *found]


def test_counting_a_strategys_memory_keeps_the_earlier_peak(tmp_path: Path) -> None:
    assert run_ranks(after_a_count, 1, str(tmp_path)) == [[True, True, False]]
