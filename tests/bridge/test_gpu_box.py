"""Test that ranks on a machine with several GPUs see all GPUs and their LOCAL_RANK, as programs for torchrun expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from forked_parents import forked_parents

from nbkit import Cluster
from nbkit.bridge.parent import spec as specs
from nbkit.bridge.parent.spec import EngineSpec, RankPin
from nbkit.device_kinds import GLOO
from nbkit.notebook.cluster.launch.pins import plan_pins
from nbkit.notebook.cluster.launch.started import launched
from nbkit.notebook.cluster.machine.gpus import Gpu
from nbkit.wire.processes import Process

BOX = Path(__file__).resolve().parents[1] / "support" / "gpu_box"


def spec_of(uuids: list[str], *, base: int = 0, device: str = "cuda") -> EngineSpec:
    pins = tuple(RankPin({"CUDA_VISIBLE_DEVICES": uuid}, (), 1) for uuid in uuids)
    return EngineSpec("box", "", "", "", GLOO, device, pins, 1.0, Process.of(1), True, base=base, world_size=8)


@pytest.mark.parametrize(
    ("uuids", "visible", "local_ranks"),
    [
        (["GPU-a", "GPU-b"], ["GPU-a,GPU-b"] * 2, [0, 1]),
        (["GPU-a", "GPU-a"], ["GPU-a", "GPU-a"], [0, 0]),
        (["MIG-a", "MIG-b"], ["MIG-a", "MIG-b"], [0, 0]),
        (["GPU-a", "MIG-b"], ["GPU-a", "MIG-b"], [0, 0]),
    ],
)
def test_a_rank_sees_all_gpus_of_its_host_unless_ranks_share_or_split_one(
    uuids: list[str], visible: list[str], local_ranks: list[int]
) -> None:
    spec = spec_of(uuids, base=4)
    assert [spec.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in spec.ranks] == visible
    assert [spec.place(rank).local_rank for rank in spec.ranks] == local_ranks


def test_ranks_on_cores_see_no_gpu_and_have_a_local_rank() -> None:
    spec = spec_of(["", ""], base=2, device="cpu")
    assert [spec.environment(rank) for rank in spec.ranks] == [{"CUDA_VISIBLE_DEVICES": ""}] * 2
    assert [spec.place(rank).local_rank for rank in spec.ranks] == [0, 1]


def test_a_rank_that_moved_to_a_spare_gpu_finds_it_at_its_local_rank(tmp_path: Path) -> None:
    spec, path = spec_of(["GPU-a", "GPU-b"]), tmp_path / "spec.json"
    path.write_text(json.dumps(asdict(spec)))
    specs.write_pins(replace(spec, pins=(spec.pins[0], RankPin({"CUDA_VISIBLE_DEVICES": "GPU-c"}, (), 1))), path)

    moved = specs.read(path)

    assert moved.environment(1)["CUDA_VISIBLE_DEVICES"].split(",")[moved.place(1).local_rank] == "GPU-c"


@pytest.fixture(scope="module")
def box(nbkit_home: Path) -> Iterator[Cluster]:
    """Yield a cluster of two ranks on a machine with two simulated GPUs."""
    gpus = [Gpu(i, f"GPU-{i}000", "NVIDIA A100-SXM4-80GB", 81920, 4, ()) for i in range(2)]
    pinning = replace(plan_pins(2, None, gpus, range(2), None), backend=GLOO)  # NCCL needs a real GPU
    with forked_parents(False), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(BOX), prepend=":")
        cluster = Cluster(launched("box", pinning, 600.0, {}))
    yield cluster
    cluster.stop()


# This is what pytorch/examples, the launchers of Lightning and Accelerate, and the tutorials of DDP and FSDP do.
PROGRAM = """
import os, pathlib, torch
local_rank, folder = int(os.environ["LOCAL_RANK"]), pathlib.Path({folder!r})
if torch.cuda.device_count() < 2:
    raise SystemExit("at least 2 GPUs")
if torch.cuda.device_count() != int(os.environ["LOCAL_WORLD_SIZE"]):
    raise SystemExit("devices=2, but this machine has another number of them")
torch.cuda.set_device(local_rank)
if local_rank == 0:
    with open(folder / "snapshot.pt", "x") as file:
        file.write("by rank " + os.environ["RANK"])
seen = [torch.cuda.device_count(), torch.cuda.current_device(), local_rank]
"""


def test_programs_for_torchrun_find_all_gpus_and_their_local_rank(box: Cluster, tmp_path: Path) -> None:
    assert box.run("[torch.cuda.current_device(), local_rank]").values == {0: [0, 0], 1: [1, 1]}

    seen = box.run(PROGRAM.format(folder=str(tmp_path)) + "seen").values

    assert seen == {0: [2, 0, 0], 1: [2, 1, 1]}
    assert (tmp_path / "snapshot.pt").read_text() == "by rank 0"


def test_a_rank_with_tensors_on_the_gpu_of_another_rank_is_named_once(
    box: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    box.run("from nbkit.rank.device import accelerator\nif rank == 1: accelerator().held[0] = 1_230_000")
    box.run("1")

    shown = "".join(capsys.readouterr())
    assert shown.count("rank 1 has 1.23 MB of tensors on cuda:0, the GPU of rank 0. Its own is cuda:1") == 1
