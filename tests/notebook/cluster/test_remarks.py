"""Test the full remarks of `%cluster start` and `nbkit doctor` on descriptions of other machines."""

from __future__ import annotations

from dataclasses import replace

import machines
import pytest

from nbkit.errors import UsageError
from nbkit.notebook.cluster.launch.pins import pins_on
from nbkit.notebook.cluster.machine.cuda_driver import CudaDriver
from nbkit.notebook.cluster.machine.gpus import Survey, parse_gpus, parse_instances, put_instances
from nbkit.notebook.cluster.machine.machine import Machine, PciGpu, read_machine
from nbkit.notebook.cluster.machine.remarks import notes_at_start, remarks

ONE_T4 = machines.KAGGLE_T4.splitlines(keepends=True)[0]
OLDEST = ONE_T4.replace("580.82.07", "470.57.02")
OLD = machines.KAGGLE_T4.replace("580.82.07", "535.183.01")
P100 = "0, GPU-7c1e, Tesla P100-PCIE-16GB, 16384, 0, 00000000:00:04.0, 580.82.07, [N/A], Default\n"
B200 = "0, GPU-b200, NVIDIA B200, 183359, 0, 00000000:1B:00.0, 580.126.20, Disabled, Default\n"
NO_LIBRARY = CudaDriver(error="libcuda.so.1: cannot open shared object file")
NVIDIA_ON_BUS = (PciGpu("NVIDIA", "0000:00:04.0", "nvidia"), PciGpu("NVIDIA", "0000:00:05.0", "nvidia"))
NOUVEAU = (PciGpu("NVIDIA", "0000:01:00.0", "nouveau"),)
MI300X = tuple(PciGpu("AMD", f"0000:{bus}:00.0", "amdgpu", is_accelerator=True) for bus in ("05", "26", "46", "65"))
RADEON = (PciGpu("AMD", "0000:03:00.0", "amdgpu"),)
ARC = (PciGpu("Intel", "0000:03:00.0", "xe"),)
ROCM, XPU = machines.torch("2.13.0+rocm7.1", hip="7.1.25424"), machines.torch("2.13.0+xpu", xpu="20250302")


def told(machine: Machine, n: int | None = None, gpus: str | None = None, *, cpu: bool = False) -> list[str]:
    """Return all remarks of `%cluster start`, about the machine and the choice of devices."""
    return [*notes_at_start(machine, n=n, gpus=gpus, cpu=cpu), *pins_on(machine, n, gpus, cpu=cpu).notes]


def kinds(machine: Machine, n: int | None = None) -> list[str]:
    return [pin.kind for pin in pins_on(machine, n).pins]


def doctor_says(machine: Machine, subject: str) -> str:
    return next(str(remark) for remark in remarks(machine) if remark.subject == subject)


def test_a_machine_without_problems_gets_no_remarks() -> None:
    assert told(machines.KAGGLE) == []
    assert told(machines.DGX_H100) == []
    assert told(machines.bare(machines.CPU_TORCH)) == []
    assert (kinds(machines.KAGGLE), kinds(machines.DGX_H100)) == (["gpu"] * 2, ["gpu"] * 8)
    assert pins_on(machines.KAGGLE).backend == "nccl"


ON_CPU = ": ranks run on the CPU. "
PIP = "pip uninstall torch, then the pip line of PyTorch's install page for {}, then restart the kernel"
CASES = {
    "cpu-torch": (
        replace(machines.KAGGLE, torch=machines.CPU_TORCH),
        "2 GPUs (Tesla T4) cannot be used, since torch 2.13.0+cpu is built for the CPU",
        "To use them: " + PIP.format("CUDA"),
    ),
    "cpu-torch-and-old-driver": (
        machines.nvidia(OLD, machines.CPU_TORCH, machines.cuda(OLD, (12, 2), (7, 5))),
        "2 GPUs (Tesla T4) cannot be used, since torch 2.13.0+cpu is built for the CPU",
        "To use them: " + PIP.format("CUDA 12"),
    ),
    "cpu-torch-and-a-driver-older-than-any-wheel": (
        machines.nvidia(OLDEST, machines.CPU_TORCH, machines.cuda(OLDEST, (11, 4), (7, 5))),
        "GPU 0 (Tesla T4) cannot be used, since torch 2.13.0+cpu is built for the CPU",
        "To use it: install a newer driver (580 or above); " + PIP.format("CUDA"),
    ),
    "old-driver": (
        machines.nvidia(OLD, machines.CUDA_13, machines.cuda(OLD, (12, 2), (7, 5))),
        "2 GPUs (Tesla T4) cannot be used, since the driver 535.183.01 knows CUDA 12.2 and torch 2.13.0 is built for "
        "CUDA 13.0",
        f"To use them: {PIP.format('CUDA 12')}; or install a newer driver (580 or above)",
    ),
    "driver-older-than-any-wheel": (
        machines.nvidia(OLDEST, machines.CUDA_13, machines.cuda(OLDEST, (11, 4), (7, 5))),
        "GPU 0 (Tesla T4) cannot be used, since the driver 470.57.02 knows CUDA 11.4 and torch 2.13.0 is built for "
        "CUDA 13.0",
        "To use it: install a newer driver (580 or above)",
    ),
    "no-libcuda": (
        replace(machines.KAGGLE, cuda=NO_LIBRARY),
        "2 GPUs (Tesla T4) cannot be used, since libcuda.so.1: cannot open shared object file",
        "To use them: in a container, docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install it",
    ),
    "no-fabric-manager": (
        replace(
            machines.DGX_H100,
            cuda=machines.cuda(machines.H100, (13, 0), (9, 0), error="system not yet initialized", code=802),
        ),
        "8 GPUs (NVIDIA H100 80GB HBM3) cannot be used, since CUDA does not start: system not yet initialized (802)",
        "To use them: sudo systemctl start nvidia-fabricmanager   (GPUs joined by NVSwitch need it)",
    ),
    "gpu-older-than-torch": (
        machines.nvidia(P100, machines.CUDA_13, machines.cuda(P100, (13, 0), (6, 0))),
        "GPU 0 (Tesla P100-PCIE-16GB) cannot be used, since torch 2.13.0 has no code for compute capability 6.0",
        "To use it: " + PIP.format("CUDA 12.6"),
    ),
    "gpu-newer-than-torch": (
        machines.nvidia(B200, machines.CUDA_12, machines.cuda(B200, (13, 0), (10, 0))),
        "GPU 0 (NVIDIA B200) cannot be used, since torch 2.13.0+cu126 has no code for compute capability 10.0",
        "To use it: " + PIP.format("CUDA 13"),
    ),
    "container-without-nvidia-smi-and-libcuda": (
        machines.bare(machines.CUDA_13, held=("Tesla T4", "Tesla T4"), cuda=NO_LIBRARY, is_container=True),
        "2 GPUs (Tesla T4) without nvidia-smi, and libcuda.so.1: cannot open shared object file",
        "To use them: docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "container-without-gpus": (
        machines.bare(machines.CUDA_13, pci=NVIDIA_ON_BUS, is_container=True),
        "2 NVIDIA GPUs in this machine, none given to this container",
        "To use them: docker run --gpus all; in Kubernetes, a limit of nvidia.com/gpu",
    ),
    "no-driver": (
        machines.bare(machines.CUDA_13, pci=NOUVEAU),
        "1 NVIDIA GPU without NVIDIA's driver (it has: nouveau)",
        "To use it, install NVIDIA's driver and restart the machine",
    ),
    "broken-driver": (
        machines.bare(machines.CUDA_13, survey=Survey(problem="nvidia-smi is installed but of no use: no NVML")),
        "nvidia-smi is installed but of no use: no NVML",
        "Run nvidia-smi in a terminal; after a driver update, restart the machine",
    ),
    "rocm": (
        machines.bare(ROCM, pci=MI300X),
        "4 AMD GPUs (ROCm), which nbkit does not pin",
        "To try, with a torch built for ROCm: torchrun --nproc-per-node 4 train.py (never run yet)",
    ),
    "xpu": (
        machines.bare(XPU, pci=ARC),
        "1 Intel GPU (XPU), which nbkit does not use",
        'A cell without %%distributed computes on one: model.to("xpu"), with a torch built for XPU',
    ),
    "mac": (
        machines.bare(machines.torch("2.13.0"), system="darwin", processor="arm64"),
        "The GPU of this Mac (MPS) cannot join a process group",
        'A cell without %%distributed computes on it: model.to("mps")',
    ),
    "kaggle-without-gpu": (
        machines.bare(machines.CPU_TORCH, is_container=True, env=machines.KAGGLE_ENV),
        "Kaggle gives this notebook no GPU",
        "For a GPU: Settings > Accelerator > GPU T4 x2",
    ),
    "colab-without-gpu": (
        machines.bare(machines.CUDA_13, is_container=True, env=machines.COLAB_ENV),
        "Colab gives this notebook no GPU",
        "For a GPU: Runtime > Change runtime type > T4 GPU",
    ),
}


@pytest.mark.parametrize(("machine", "seen", "hint"), CASES.values(), ids=CASES)
def test_a_machine_whose_gpus_no_rank_can_use_gets_one_sentence(machine: Machine, seen: str, hint: str) -> None:
    assert told(machine) == [f"{seen}{ON_CPU}{hint}"]
    assert kinds(machine) == ["cpu", "cpu"]
    assert told(machine, cpu=True) == []


def test_one_gpu_gets_one_rank_and_a_remark_on_how_to_get_two() -> None:
    colab = machines.nvidia(ONE_T4, machines.CUDA_13, machines.T4_DRIVER, env=machines.COLAB_ENV, is_container=True)

    (alone,) = told(colab)
    ways = "-n 2 --cpu, or --gpus 0,0 (two ranks share the GPU, over gloo)"
    assert alone == f"One GPU (Tesla T4): one rank. To try strategies: {ways}"
    assert told(colab, 1) == []
    (shared,) = told(colab, gpus="0,0")
    assert (
        shared == "Ranks 0, 1 are on one physical GPU (0): gloo instead of NCCL, which refuses that; memory is shared."
    )


def test_a_container_without_nvidia_smi_gets_its_gpus_from_the_cuda_driver() -> None:
    machine = Machine(
        machines.CUDA_13, held=("Tesla T4",) * 2, cuda=machines.T4_DRIVER, is_container=True, cores=(0, 1)
    )
    plan = pins_on(machine)

    assert [pin.env["CUDA_VISIBLE_DEVICES"][:8] for pin in plan.pins] == ["GPU-0f4d", "GPU-b1d0"]
    assert plan.backend == "nccl"
    assert told(machine) == [
        "2 GPUs (Tesla T4) without nvidia-smi: taken as idle, since nobody tells who computes on them. To be told: "
        "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ]
    assert len(told(replace(machine, torch=machines.CPU_TORCH))) == 1


def test_a_driver_of_the_same_major_release_of_cuda_is_enough() -> None:
    machine = machines.nvidia(OLD, machines.torch("2.13.0+cu128", cuda="12.8"), machines.cuda(OLD, (12, 2), (7, 5)))

    assert told(machine) == []
    assert kinds(machine) == ["gpu", "gpu"]


def test_a_self_built_torch_is_assumed_to_have_code_for_the_gpus() -> None:
    own = machines.torch("2.13.0a0+git1f2e3d4", cuda="13.0")

    assert kinds(machines.nvidia(P100, own, machines.cuda(P100, (13, 0), (6, 0)))) == ["gpu"]


def test_without_an_answer_of_the_cuda_driver_gpus_are_used_as_nvidia_smi_shows_them() -> None:
    assert kinds(replace(machines.KAGGLE, cuda=None)) == ["gpu", "gpu"]
    assert told(replace(machines.KAGGLE, cuda=None)) == []


def test_a_requested_gpu_that_cannot_be_used_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="No rank can compute on GPU 0") as error:
        pins_on(replace(machines.KAGGLE, torch=machines.CPU_TORCH), gpus="0")

    assert error.value.numbers == "torch 2.13.0+cpu is built for the CPU"
    assert "pip uninstall torch" in error.value.hint and "--cpu" in error.value.hint


def test_one_unusable_gpu_of_several_gets_no_rank() -> None:
    mixed = f"{ONE_T4}1, GPU-p1, Tesla P100-PCIE-16GB, 16384, 0, 00000000:00:05.0, 580.82.07, [N/A], Default\n"
    driver = machines.cuda(mixed, (13, 0), (7, 5))
    driver = replace(driver, devices=(driver.devices[0], replace(driver.devices[1], capability=(6, 0))))

    machine = machines.nvidia(mixed, machines.CUDA_13, driver)
    first, second = told(machine)
    assert first.startswith("GPU 1 (Tesla P100-PCIE-16GB) cannot be used, since torch 2.13.0 has no code for")
    assert "6.0: left alone. To use it: " in first
    assert second.startswith("One GPU (Tesla T4): one rank.")
    assert told(machine, 1) == told(machine, gpus="0") == []
    assert told(replace(machine, env={"CUDA_VISIBLE_DEVICES": "GPU-0f4d"})) == [second]


def test_one_gpu_in_use_gets_only_the_remark_that_it_is_in_use() -> None:
    stranger = "GPU-0f4ddc2a-66d0-7bf4-1a0c-2b8d6f0d7a01, 4242, python, 9000\n"
    machine = machines.nvidia(ONE_T4, machines.CUDA_13, machines.T4_DRIVER, stranger)

    (sentence,) = told(machine)
    assert sentence.startswith("GPU 0 (Tesla T4) is in use and left alone: pid 4242 (python)")


def test_mig_instances_count_as_gpus_that_share_no_memory() -> None:
    uuid = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
    whole = f"0, {uuid}, NVIDIA A100-SXM4-40GB, 40960, 38, 00000000:07:00.0, 580.82.07, Enabled, Default\n"
    listing = (
        f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)\n"
    )
    cut = put_instances(parse_gpus(whole), parse_instances(listing), "<nvidia_smi_log/>")
    machine = machines.bare(machines.CUDA_13, survey=Survey(tuple(cut)), cuda=machines.cuda(whole, (13, 0), (8, 0)))

    assert told(machine) == ["Ranks 0, 1 are on one physical GPU (0): gloo instead of NCCL, which refuses that."]
    assert "2 MIG instances of 1 GPU" in doctor_says(machine, "MIG")
    uncut = machines.nvidia(whole, machines.CUDA_13, machines.cuda(whole, (13, 0), (8, 0), error="no device", code=100))
    (sentence,) = told(uncut)
    assert "it is in MIG mode and has no instance: ranks run on the CPU" in sentence
    assert "sudo nvidia-smi -i 0 -mig 0" in sentence


def test_an_mps_server_makes_no_gpu_busy_and_is_named_by_the_doctor() -> None:
    server = "GPU-0f4ddc2a-66d0-7bf4-1a0c-2b8d6f0d7a01, 2100, nvidia-cuda-mps-server, 28\n"
    machine = machines.nvidia(machines.KAGGLE_T4, machines.CUDA_13, machines.T4_DRIVER, server)

    assert told(machine) == []
    assert kinds(machine) == ["gpu", "gpu"]
    assert "runs on GPU 0: it counts as nobody's" in doctor_says(machine, "MPS server")


def test_the_doctor_says_that_emulated_bf16_is_slow() -> None:
    assert doctor_says(machines.KAGGLE, "bf16").endswith('precision="bf16" is warned of. precision="fp16"')
    assert not any(remark.subject == "bf16" for remark in remarks(machines.DGX_H100))


def test_the_doctor_names_gpu_links_and_network_ports() -> None:
    assert doctor_says(machines.DGX_H100, "GPU links") == "NVLink between all 8 (NV18): by NCCL."
    assert doctor_says(machines.KAGGLE, "GPU links") == "PCIe through the CPU between both (PHB): by NCCL."
    assert doctor_says(machines.DGX_H100, "network").startswith("8 InfiniBand ports of 400 Gb/s (mlx5_0 to mlx5_7): ")


def test_ranks_get_cores_of_the_socket_of_their_gpu() -> None:
    pins = pins_on(machines.DGX_H100).pins

    assert all({*pin.cores} <= {*machines.TWO_SOCKETS[rank >= 4]} for rank, pin in enumerate(pins))
    assert sorted(core for pin in pins for core in pin.cores) == [*range(224)]


def test_only_the_doctor_reports_desktop_graphics() -> None:
    for machine in (
        machines.bare(machines.CUDA_13, pci=RADEON),
        machines.bare(machines.CPU_TORCH, pci=ARC),
        machines.bare(machines.CPU_TORCH, pci=NOUVEAU),
        machines.bare(machines.CPU_TORCH, pci=NVIDIA_ON_BUS, is_container=True),
    ):
        assert told(machine) == []
        assert len(remarks(machine)) == 1
    assert [remark.used for remark in remarks(replace(machines.KAGGLE, pci=RADEON)) if "AMD" in remark.seen] == [
        "left alone"
    ]


def test_this_machine_can_be_read() -> None:
    machine = read_machine(links=True)

    assert machine.torch.version and machine.cores
    assert told(machine, 1, cpu=True) == []
    assert all(str(remark) for remark in remarks(machine))
