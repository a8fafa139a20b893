"""Test the choice of a device for each rank, on descriptions of other machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbkit.errors import UsageError
from nbkit.notebook.cluster.launch.pins import Pin, Pinning, pins_on, plan_pins
from nbkit.notebook.cluster.machine.gpus import Gpu, GpuProcess, Unfit
from nbkit.notebook.cluster.machine.machine import read_machine

A100 = "NVIDIA A100-SXM4-80GB"
STRANGER = GpuProcess(48213, "/usr/bin/python", 30720)


def gpus(count: int, busy: tuple[int, ...] = ()) -> list[Gpu]:
    return [
        Gpu(i, f"GPU-{i}000", A100, 81920, 30724 if i in busy else 4, (STRANGER,) if i in busy else ())
        for i in range(count)
    ]


def mig(slot: int) -> Gpu:
    return Gpu(0, f"MIG-{slot}000", f"{A100} MIG 3g.40gb", 40192, 13, (), parent="GPU-0000", slot=slot)


def uuids(plan: Pinning) -> list[str]:
    return [pin.env["CUDA_VISIBLE_DEVICES"] for pin in plan.pins]


def test_without_a_number_every_idle_gpu_gets_a_rank() -> None:
    plan = plan_pins(None, None, gpus(4), range(16), None)

    assert uuids(plan) == ["GPU-0000", "GPU-1000", "GPU-2000", "GPU-3000"]
    assert plan.backend == "nccl"
    assert [pin.kind for pin in plan.pins] == ["gpu"] * 4
    assert plan.notes == ()


def test_a_gpu_in_use_by_others_is_named_and_not_used() -> None:
    plan = plan_pins(2, None, gpus(3, busy=(1,)), range(8), None)

    assert uuids(plan) == ["GPU-0000", "GPU-2000"]
    (note,) = plan.notes
    assert "GPU 1" in note
    assert "pid 48213" in note
    assert "30.0 GiB" in note
    assert "--gpus 1" in note


def test_one_gpu_is_taken_if_others_use_gpus_and_no_number_is_given() -> None:
    plan = plan_pins(None, None, gpus(4, busy=(1,)), range(8), None)

    assert uuids(plan) == ["GPU-0000"]
    assert "One GPU is taken, since others use GPUs here. 3 are idle: -n 3 takes them." in plan.notes


def test_without_an_idle_gpu_two_ranks_run_on_the_cpu_with_the_reason() -> None:
    plan = plan_pins(None, None, gpus(1, busy=(0,)), range(8), None)

    assert [pin.kind for pin in plan.pins] == ["cpu", "cpu"]
    assert plan.backend == "gloo"
    assert "none of 1 GPUs is idle" in plan.pins[0].why
    assert "GPU 0" in plan.notes[0]


def test_more_ranks_than_idle_gpus_are_refused_with_what_to_type() -> None:
    with pytest.raises(UsageError) as error:
        plan_pins(4, None, gpus(4, busy=(1, 2)), range(8), None)

    assert "4 ranks, 2 idle of 4 GPUs" in error.value.numbers
    assert "pid 48213" in error.value.numbers
    for way in ("-n 2", "--gpus 0,3,0,3 (ranks share a GPU, over gloo)", "--cpu"):
        assert way in error.value.hint


def test_when_every_gpu_is_in_use_the_hint_says_so() -> None:
    with pytest.raises(UsageError) as error:
        plan_pins(1, None, gpus(2, busy=(0, 1)), range(8), None)

    assert error.value.hint == "--gpus 0 (in use by others)   or   --cpu"


def test_fewer_ranks_than_gpus_take_the_first_idle_ones() -> None:
    assert uuids(plan_pins(2, None, gpus(4, busy=(0,)), range(8), None)) == ["GPU-1000", "GPU-2000"]


def test_an_inherited_cuda_visible_devices_keeps_its_order() -> None:
    assert uuids(plan_pins(None, None, gpus(4), range(8), "3,1")) == ["GPU-3000", "GPU-1000"]
    assert uuids(plan_pins(1, None, gpus(4), range(8), "GPU-2")) == ["GPU-2000"]


def test_an_empty_cuda_visible_devices_means_the_cpu_with_a_note() -> None:
    plan = plan_pins(3, None, gpus(4), range(8), "")

    assert [pin.kind for pin in plan.pins] == ["cpu"] * 3
    assert "CUDA_VISIBLE_DEVICES=''" in plan.notes[0]


def test_listed_gpus_keep_their_order_and_are_named_if_in_use() -> None:
    plan = plan_pins(None, "2,1", gpus(4, busy=(1,)), range(8), None)

    assert uuids(plan) == ["GPU-2000", "GPU-1000"]
    assert plan.backend == "nccl"
    (note,) = plan.notes
    assert "GPU 1 is taken though it is in use: pid 48213" in note


def test_two_ranks_on_one_gpu_use_gloo_with_a_note() -> None:
    plan = plan_pins(2, "0,0", gpus(2), range(8), None)

    assert uuids(plan) == ["GPU-0000", "GPU-0000"]
    assert plan.backend == "gloo"
    assert "Ranks 0, 1 are on one physical GPU (0): gloo instead of NCCL" in plan.notes[0]


def test_two_mig_instances_of_one_gpu_use_gloo_too() -> None:
    plan = plan_pins(None, None, [mig(0), mig(1)], range(8), None)

    assert uuids(plan) == ["MIG-0000", "MIG-1000"]
    assert plan.backend == "gloo"
    assert plan_pins(None, "0:1", [mig(0), mig(1)], range(8), None).backend == "nccl"


def test_a_list_of_fewer_gpus_than_ranks_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        plan_pins(3, "0,1", gpus(2), range(8), None)

    assert "3 ranks, 2 GPUs in --gpus 0,1" in error.value.numbers
    assert "-n 3 --gpus 0,1,0" in error.value.hint


@pytest.mark.parametrize(
    ("n", "listed", "cpu", "found"),
    [(0, None, False, 2), (-1, None, True, 0), (None, "0", True, 2), (1, "0", False, 0)],
)
def test_impossible_options_are_refused(n: int | None, listed: str | None, cpu: bool, found: int) -> None:
    with pytest.raises(UsageError) as error:
        plan_pins(n, listed, gpus(found), range(8), None, cpu=cpu)
    assert error.value.numbers
    assert error.value.hint


def test_cpu_ranks_see_no_gpu() -> None:
    plan = plan_pins(None, None, gpus(4), range(8), None, cpu=True)

    assert uuids(plan) == ["", ""]
    assert "asked for with --cpu" in plan.pins[0].why


def test_cores_are_divided_into_blocks_with_a_thread_for_each_core() -> None:
    plan = plan_pins(3, None, [], [0, 1, 2, 3, 8, 9, 10, 11], None)

    assert [pin.cores for pin in plan.pins] == [(0, 1, 2), (3, 8, 9), (10, 11)]
    assert [pin.threads for pin in plan.pins] == [3, 3, 2]
    assert [pin.label for pin in plan.pins] == ["cores 0-2", "cores 3,8-9", "cores 10-11"]


def test_gpu_ranks_divide_the_cores_too() -> None:
    assert [pin.cores for pin in plan_pins(2, None, gpus(2), range(4), None).pins] == [(0, 1), (2, 3)]


def test_more_ranks_than_cores_share_them_with_a_note() -> None:
    plan = plan_pins(4, None, [], [4, 7], None)

    assert [pin.cores for pin in plan.pins] == [(4,), (7,), (4,), (7,)]
    assert [pin.threads for pin in plan.pins] == [1, 1, 1, 1]
    assert plan.notes == ("4 ranks share 2 cores, 1 thread each.",)


def test_the_cpu_quota_of_a_container_limits_the_threads() -> None:
    plan = plan_pins(4, None, [], range(64), None, quota=6.0)

    assert [len(pin.cores) for pin in plan.pins] == [16, 16, 16, 16]
    assert [pin.threads for pin in plan.pins] == [1, 1, 1, 1]
    assert "6 of 64 cores" in plan.notes[0]
    assert plan_pins(2, None, gpus(2), range(8), None, quota=6.0).pins[0].threads == 3
    assert plan_pins(2, None, [], range(8), None, quota=100.0).pins[0].threads == 4


def test_inherited_numbers_of_different_gpus_get_a_note_about_their_order() -> None:
    mixed = [*gpus(1), Gpu(1, "GPU-1000", "NVIDIA T400", 4096, 3)]

    assert "nvidia-smi's order" in plan_pins(None, None, mixed, range(8), "1").notes[0]
    assert plan_pins(None, None, mixed, range(8), "GPU-1").notes == ()


def test_one_rank_takes_all_cores() -> None:
    assert plan_pins(1, None, [], range(6), None).pins[0].cores == tuple(range(6))


def test_gpu_memory_of_this_notebook_gets_a_note() -> None:
    (gpu,) = [Gpu(0, "GPU-0000", A100, 81920, 3004, (GpuProcess(99, "python", 3000),))]

    plan = plan_pins(None, None, [gpu], range(4), None, own_pid=99)

    assert uuids(plan) == ["GPU-0000"]
    assert "This notebook's own kernel uses GPU 0: pid 99 (python) holds 2.9 GiB" in plan.notes[0]


def test_every_pin_has_its_reason() -> None:
    plan = plan_pins(None, None, gpus(2), range(4), None)

    assert plan.pins[1].why == "GPU 1 (GPU-1000): idle; cores 2-3 of 4"
    assert plan.pins[1].label == f"GPU 1 {A100}"


def test_a_pin_without_a_core_and_pins_with_a_gap_are_refused() -> None:
    pin = Pin(1, "cpu", {}, (0,), 1, "core 0", "a reason")

    with pytest.raises(UsageError):
        Pin(0, "cpu", {}, (), 1, "no core", "a reason")
    with pytest.raises(UsageError):
        Pinning((pin,), "gloo")


def test_pins_on_this_machine_use_its_cores() -> None:
    machine = read_machine()
    plan = pins_on(machine, 2, cpu=True)

    assert [pin.kind for pin in plan.pins] == ["cpu", "cpu"]
    assert {core for pin in plan.pins for core in pin.cores} <= {*machine.cores}


def test_an_unfit_gpu_gets_no_rank_and_is_refused_by_name() -> None:
    unfit = Unfit("it is in MIG mode and has no instance", "sudo nvidia-smi -i 1 -mig 0")
    found = [gpu if gpu.index != 1 else replace(gpu, unfit=unfit) for gpu in gpus(3)]

    assert uuids(plan_pins(None, None, found, range(6), None)) == ["GPU-0000", "GPU-2000"]
    assert uuids(plan_pins(2, None, found[1:2], range(6), None)) == ["", ""]
    with pytest.raises(UsageError, match="No rank can compute on GPU 1") as error:
        plan_pins(None, "0,1", found, range(6), None)
    assert error.value.hint == "sudo nvidia-smi -i 1 -mig 0   or   --cpu"


def test_a_rank_gets_cores_of_the_socket_of_its_gpu() -> None:
    """Use two sockets with hyperthreads, numbered as by Linux. The GPUs of ranks 0 and 2 are on the second."""
    first, second = (*range(8), *range(16, 24)), (*range(8, 16), *range(24, 32))
    found = [replace(gpu, near=near) for gpu, near in zip(gpus(3), (second, first, second), strict=True)]
    cores = [core for pair in zip(range(16), range(16, 32), strict=True) for core in pair]

    plan = plan_pins(None, None, found, cores, None)

    assert [{*pin.cores} for pin in plan.pins] == [{*range(8, 12), *range(24, 28)}, {*first},
                                                   {*range(12, 16), *range(28, 32)}]  # fmt: skip
    assert plan.pins[1].why == "GPU 1 (GPU-1000): idle; cores 0-7,16-23 of 32, on its socket"


def test_all_cores_are_divided_if_a_socket_has_too_few_for_its_ranks() -> None:
    found = [replace(gpu, near=(6, 7)) for gpu in gpus(3)]

    mixed = [replace(gpu, near=near) for gpu, near in zip(gpus(2), (range(4), range(2, 6)), strict=True)]

    assert [pin.cores for pin in plan_pins(None, None, found, range(6), None).pins] == [(0, 1), (2, 3), (4, 5)]
    assert [pin.cores for pin in plan_pins(None, None, mixed, range(6), None).pins] == [(0, 1, 2), (3, 4, 5)]
    assert [pin.cores for pin in plan_pins(None, None, found, range(8), None).pins] == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_spare_gpus_are_the_last_idle_ones_and_have_no_rank() -> None:
    plan = plan_pins(2, None, gpus(5, busy=(1,)), range(8), None, spares=1)

    assert uuids(plan) == ["GPU-0000", "GPU-2000"]
    (spare,) = plan.spares
    assert (spare.rank, spare.env["CUDA_VISIBLE_DEVICES"], spare.label) == (2, "GPU-3000", f"GPU 3 {A100}")
    assert ": idle, a spare; " in spare.why and "spare" not in plan.pins[1].why
    assert {*spare.cores}.isdisjoint(plan.pins[0].cores + plan.pins[1].cores)
    assert plan.backend == "nccl"


def test_without_a_number_all_idle_gpus_except_spares_get_ranks() -> None:
    assert uuids(plan_pins(None, None, gpus(4), range(8), None, spares=1)) == ["GPU-0000", "GPU-1000", "GPU-2000"]
    alone = plan_pins(None, None, gpus(5, busy=(0,)), range(8), None, spares=2)
    assert uuids(alone) == ["GPU-1000"] and len(alone.spares) == 2  # others use GPUs here
    assert any("-n 2 takes them" in note for note in alone.notes)


def test_the_last_listed_gpus_are_the_spares() -> None:
    plan = plan_pins(None, "3,1,2", gpus(4), range(8), None, spares=1)

    assert uuids(plan) == ["GPU-3000", "GPU-1000"]
    assert [pin.env["CUDA_VISIBLE_DEVICES"] for pin in plan.spares] == ["GPU-2000"]


@pytest.mark.parametrize(
    ("n", "listed", "cpu", "spares", "numbers", "hint"),
    [
        (4, None, False, 2, "4 ranks and 2 spares, 5 idle of 5 GPUs", "-n 4 --spares 1   or   -n 3 --spares 2"),
        (None, None, False, 5, "1 rank and 5 spares, 5 idle of 5 GPUs", "-n 1 --spares 4"),
        (5, None, False, 1, "5 ranks and 1 spare, 5 idle of 5 GPUs", "-n 4 --spares 1"),
        (2, "0,1", False, 1, "2 ranks and 1 spare, 2 GPUs in --gpus 0,1", "-n 1 --spares 1"),
        (None, "0,0", False, 1, "for ranks: GPU 0; spare: GPU 0", "--gpus 0"),
        (None, "0,1,0", False, 1, "for ranks: GPU 0, 1; spare: GPU 0", "--gpus 0,1 --spares 1"),
        (2, None, True, 4, "1 rank and 4 spares, 4 CPU cores", "-n 1 --spares 3"),
        (2, None, True, -1, "--spares -1", "--spares 1"),
    ],
)
def test_too_few_devices_for_ranks_and_spares_are_refused_with_what_to_type(
    n: int | None, listed: str | None, cpu: bool, spares: int, numbers: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        plan_pins(n, listed, gpus(5), range(4), None, cpu=cpu, spares=spares)

    assert (error.value.numbers, error.value.hint) == (numbers, hint)


def test_spare_cores_are_not_used_by_ranks() -> None:
    plan = plan_pins(3, None, [], range(8), None, spares=1)
    assert [pin.cores for pin in (*plan.pins, *plan.spares)] == [(0, 1), (2, 3), (4, 5), (6, 7)]

    few = plan_pins(4, None, [], range(3), None, spares=1)  # ranks share cores, but not with a spare
    assert [pin.cores for pin in (*few.pins, *few.spares)] == [(0,), (1,), (0,), (1,), (2,)]
    assert few.notes == ("4 ranks share 2 cores, 1 thread each.",)
