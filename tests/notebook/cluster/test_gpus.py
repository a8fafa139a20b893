"""Test that the output of nvidia-smi is parsed, and that CUDA_VISIBLE_DEVICES is read as CUDA reads it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nbkit.errors import UsageError
from nbkit.notebook.cluster.machine.gpus import (
    choose_gpus,
    find_gpus,
    parse_gpus,
    parse_instances,
    put_instances,
    survey_gpus,
    visible_gpus,
)


def ended(rows: str, end: str) -> str:
    """Append `end` to each row: the place on the bus, the driver, the MIG mode and the compute mode."""
    return "".join(f"{row}, {end}\n" for row in rows.splitlines())


A100 = ended(
    """\
0, GPU-8a56a4bc-e184-a047-2620-be19fdf913d5, NVIDIA A100-SXM4-80GB, 81920, 4
1, GPU-1d6a1bb8-f0a8-2f2b-6c4a-0e6c1a4d4c11, NVIDIA A100-SXM4-80GB, 81920, 31277
2, GPU-8a5f0c9e-2c39-1f6d-9e0b-c7f9e6d5a222, NVIDIA A100-SXM4-80GB, 81920, 4
3, GPU-f3b8e7a2-5b7e-4c58-8a44-3c9d64b10333, NVIDIA A100-SXM4-80GB, 81920, 4
""",
    "00000000:07:00.0, 550.54.15, Disabled, Default",
)
A100_PROCESSES = """\
GPU-1d6a1bb8-f0a8-2f2b-6c4a-0e6c1a4d4c11, 48213, /opt/conda/bin/python, 30720
GPU-1d6a1bb8-f0a8-2f2b-6c4a-0e6c1a4d4c11, 48999, python -c import a, b, 548
"""
T4 = """\
0, GPU-0f4ddc2a-66d0-7bf4-1a0c-2b8d6f0d7a01, Tesla T4, 15360, 3, 00000000:00:04.0, 550.90.07, [N/A], Default
1, GPU-b1d0e6a7-91d5-5c60-e1a9-63a5b9f4c502, Tesla T4, 15360, 3, 00000000:00:05.0, 550.90.07, [N/A], Default
"""
REST = "00000000:00:04.0, 550.90.07, [N/A], Default"  # place on the bus, driver, MIG, compute mode
MIG_L = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-21d4e8a1-0a6b-41d1-8c3b-5b1f3e4d9988)
"""
MIG_GPUS = ended(
    "0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, NVIDIA A100-SXM4-40GB, 40960, 5208",
    "00000000:07:00.0, 535.183.01, Enabled, Default",
) + ended(
    "1, GPU-21d4e8a1-0a6b-41d1-8c3b-5b1f3e4d9988, NVIDIA A100-SXM4-40GB, 40960, 2",
    "00000000:0A:00.0, 535.183.01, Disabled, Default",
)
MIG_XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <gpu id="00000000:07:00.0">
    <uuid>GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77</uuid>
    <mig_devices>
      <mig_device><index>0</index><gpu_instance_id>2</gpu_instance_id><compute_instance_id>0</compute_instance_id>
        <fb_memory_usage><total>20096 MiB</total><used>19 MiB</used></fb_memory_usage></mig_device>
      <mig_device><index>1</index><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0</compute_instance_id>
        <fb_memory_usage><total>9984 MiB</total><used>5189 MiB</used></fb_memory_usage></mig_device>
    </mig_devices>
    <processes>
      <process_info><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0</compute_instance_id>
        <pid>7001</pid><type>C</type><process_name>python3</process_name><used_memory>5120 MiB</used_memory>
      </process_info>
    </processes>
  </gpu>
  <gpu id="00000000:0A:00.0"><uuid>GPU-21d4e8a1-0a6b-41d1-8c3b-5b1f3e4d9988</uuid></gpu>
</nvidia_smi_log>
"""


def mig_machine() -> list:
    return put_instances(parse_gpus(MIG_GPUS), parse_instances(MIG_L), MIG_XML)


def test_gpus_are_read_with_their_memory_and_the_processes_on_them() -> None:
    gpus = parse_gpus(A100, A100_PROCESSES)

    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert (gpus[0].name, gpus[0].total_mib, gpus[0].used_mib) == ("NVIDIA A100-SXM4-80GB", 81920, 4)
    assert [(p.pid, p.mib) for p in gpus[1].processes] == [(48213, 30720), (48999, 548)]
    assert gpus[1].processes[1].name == "python -c import a, b"
    assert gpus[0].processes == ()


def test_memory_that_the_driver_does_not_report_is_unknown_and_not_zero() -> None:
    (gpu,) = parse_gpus(f"0, GPU-aa, NVIDIA GB10, [N/A], [Not Supported], {REST}\n", "GPU-aa, 12, [Not Found], [N/A]\n")

    assert (gpu.total_mib, gpu.used_mib) == (None, None)
    assert gpu.in_use_by_others() == "pid 12 ([Not Found]) holds unknown memory"


def test_a_gpu_is_in_use_if_it_has_a_process_or_much_used_memory() -> None:
    gpus = parse_gpus(A100, A100_PROCESSES)
    (hidden,) = parse_gpus(f"0, GPU-aa, Tesla T4, 15360, 900, {REST}\n")
    (desktop,) = parse_gpus(f"0, GPU-aa, Tesla T4, 15360, 300, {REST}\n")
    (big,) = parse_gpus(f"0, GPU-aa, H200, 143771, 1100, {REST}\n")

    assert gpus[0].in_use_by_others() == ""
    assert gpus[1].in_use_by_others().startswith("pid 48213 (python) holds 30.0 GiB, pid 48999")
    assert "900 MiB of 15.0 GiB" in hidden.in_use_by_others()
    assert desktop.in_use_by_others() == ""
    assert "1.1 GiB" in big.in_use_by_others()


def test_memory_of_the_notebook_does_not_make_a_gpu_busy() -> None:
    (gpu,) = parse_gpus(f"0, GPU-aa, Tesla T4, 15360, 5003, {REST}\n", "GPU-aa, 77, python, 5000\n")

    assert gpu.in_use_by_others(own_pid=77) == ""
    assert gpu.in_use_by_others(own_pid=78) != ""


def test_clients_of_the_mps_server_make_a_gpu_busy_but_the_server_does_not() -> None:
    """Use 28 MiB, the memory of an idle server of CUDA's Multi-Process Service."""
    server = "GPU-aa, 2100, nvidia-cuda-mps-server, 28\n"
    (served,) = parse_gpus(f"0, GPU-aa, Tesla T4, 15360, 31, {REST}\n", server)
    (working,) = parse_gpus(f"0, GPU-aa, Tesla T4, 15360, 2331, {REST}\n", f"{server}GPU-aa, 2200, python, 2300\n")
    (hidden,) = parse_gpus(f"0, GPU-aa, Tesla T4, 15360, 2331, {REST}\n", server)

    assert served.in_use_by_others() == ""
    assert working.in_use_by_others() == "pid 2200 (python) holds 2.2 GiB"
    assert "processes that nvidia-smi does not show" in hidden.in_use_by_others()


def test_a_gpu_in_mig_mode_without_an_instance_or_in_prohibited_mode_is_unfit() -> None:
    cut, whole, closed = parse_gpus(
        "0, GPU-aa, NVIDIA A100-SXM4-40GB, 40960, 2, 00000000:07:00.0, 535.183.01, Enabled, Default\n"
        "1, GPU-bb, NVIDIA A100-SXM4-40GB, 40960, 2, 00000000:0A:00.0, 535.183.01, Disabled, Exclusive_Process\n"
        "2, GPU-cc, NVIDIA A100-SXM4-40GB, 40960, 2, 00000000:47:00.0, 535.183.01, Disabled, Prohibited\n"
    )

    assert cut.unfit and "MIG mode and has no instance" in cut.unfit.why and "-i 0 -mig 0" in cut.unfit.fix
    assert whole.unfit is None and whole.bus == "0000:0a:00.0"
    assert closed.unfit and closed.unfit.fix == "sudo nvidia-smi -i 2 -c DEFAULT"


def test_mig_instances_replace_their_gpu_with_their_own_memory_and_processes() -> None:
    first, second, whole = mig_machine()

    assert [gpu.number for gpu in (first, second, whole)] == ["0:0", "0:1", "1"]
    assert first.uuid == "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
    assert (first.name, first.total_mib) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20096)
    assert first.in_use_by_others() == ""
    assert second.in_use_by_others() == "pid 7001 (python3) holds 5.0 GiB"
    assert first.chip == second.chip != whole.chip
    assert first.unfit is None and first.bus == second.bus == "0000:07:00.0"


def test_a_mig_instance_without_a_description_is_in_use_if_its_gpu_is() -> None:
    gpus = parse_gpus(MIG_GPUS, "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, 7001, python3, 5120\n")

    instances = put_instances(gpus, parse_instances(MIG_L), "<nvidia_smi_log/>")

    assert [bool(gpu.in_use_by_others()) for gpu in instances] == [True, True, False]


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        (" 3 , 1", ["3", "1"]),
        ("GPU-f3b8,GPU-1d6a1bb8-f0a8-2f2b-6c4a-0e6c1a4d4c11", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,2", ["1"]),
        ("GPU-8a5", []),
        ("1,1", ["1"]),
    ],
    ids=["unset", "order", "spaces", "uuids", "empty", "minus", "none", "ends", "ambiguous", "twice"],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, numbers: list[str]) -> None:
    assert [gpu.number for gpu in visible_gpus(parse_gpus(A100), visible)] == numbers


def test_cuda_visible_devices_names_mig_instances() -> None:
    assert [gpu.number for gpu in visible_gpus(mig_machine(), "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")] == ["0:1"]
    assert [gpu.number for gpu in visible_gpus(mig_machine(), "0")] == ["0:0"]


def test_listed_gpus_keep_their_own_numbers_under_cuda_visible_devices() -> None:
    gpus = parse_gpus(A100)

    assert [gpu.index for gpu in choose_gpus(gpus, "3,2,3", visible="2,3")] == [3, 2, 3]
    with pytest.raises(UsageError, match="hidden") as hidden:
        choose_gpus(gpus, "0", visible="2,3")
    assert "CUDA_VISIBLE_DEVICES=2,3" in hidden.value.numbers
    assert hidden.value.hint == "--gpus 2,3"


@pytest.mark.parametrize("text", ["4", "x", "", "0,,1", "0-1"])
def test_an_unknown_listed_gpu_is_refused_with_the_choice(text: str) -> None:
    with pytest.raises(UsageError) as error:
        choose_gpus(parse_gpus(A100), text)
    assert "4 GPUs found, to choose from: 0, 1, 2, 3" in error.value.numbers


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a script named nvidia-smi into PATH, which prints what a real one printed."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def answers(folder: Path, gpus: str, processes: str, listing: str, xml: str = "") -> str:
    for name, text in {"gpus": gpus, "processes": processes, "listing": listing, "xml": xml}.items():
        (folder / name).write_text(text)
    return f"""case "$1" in
        --query-gpu=*) cat {folder}/gpus;; --query-compute-apps=*) cat {folder}/processes;;
        -L) cat {folder}/listing;; -q) cat {folder}/xml;; *) exit 2;; esac"""


def test_find_gpus_reads_gpus_and_processes_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, answers(tmp_path, A100, A100_PROCESSES, ""))

    assert find_gpus() == parse_gpus(A100, A100_PROCESSES)


def test_find_gpus_reads_mig_instances_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, answers(tmp_path, MIG_GPUS, "", MIG_L, MIG_XML))

    assert find_gpus() == mig_machine()


def test_a_machine_without_nvidia_smi_has_no_gpus_and_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert survey_gpus().gpus == ()
    assert survey_gpus().problem == ""


def test_a_driver_that_sees_no_gpu_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")

    assert (survey_gpus().gpus, survey_gpus().problem) == ((), "")


def test_a_broken_driver_is_reported_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")

    assert survey_gpus().gpus == ()
    assert "Driver/library version mismatch" in survey_gpus().problem


def test_an_unreadable_answer_of_nvidia_smi_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'surprise, surprise'")

    assert "of no use" in survey_gpus().problem
