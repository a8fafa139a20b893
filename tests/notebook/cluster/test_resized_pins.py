"""Test the devices after a resize: remaining ranks keep their GPUs, and too many ranks are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nbkit.errors import UsageError
from nbkit.notebook.cluster.launch.pins import pins_on, resized_pins
from nbkit.notebook.cluster.machine.gpus import Gpu, Survey
from nbkit.notebook.cluster.machine.machine import Machine, TorchBuild
from nbkit.notebook.cluster.site_settings import Site


@pytest.fixture(autouse=True)
def no_other_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))


def gpus(count: int) -> Machine:
    """Return a machine with idle GPUs. Those of our own ranks are idle too until they compute."""
    found = tuple(Gpu(i, f"GPU-{i}000", "A100", 81920, 4) for i in range(count))
    return Machine(TorchBuild("2.13.0", cuda="13.0"), Survey(found), cores=tuple(range(8)))


def test_gpus_stay_with_their_ranks_and_new_ranks_get_others() -> None:
    machine = gpus(4)
    two = pins_on(machine, gpus="1,2")
    four = resized_pins(Site(), machine, two, 4)
    assert four.pins[:2] == two.pins
    assert [pin.env["CUDA_VISIBLE_DEVICES"] for pin in four.pins[2:]] == ["GPU-0000", "GPU-3000"]
    assert [pin.rank for pin in four.pins] == [0, 1, 2, 3]
    assert resized_pins(Site(), machine, four, 3).pins == four.pins[:3]


def test_more_ranks_than_gpus_or_than_the_site_allows_are_refused_with_what_fits() -> None:
    machine = gpus(3)
    two = pins_on(machine, gpus="0,1")
    with pytest.raises(UsageError, match=r"cannot grow to 4 ranks\. More ranks than idle GPUs") as refused:
        resized_pins(Site(), machine, two, 4)
    assert refused.value.hint == "%cluster resize 3"
    three = resized_pins(Site(), machine, two, 3)
    with pytest.raises(UsageError, match="0 idle"):
        resized_pins(Site(), machine, three, 4)
    limited = Site(max_ranks=1, sources={"max_ranks": Path("nbkit.toml")})
    with pytest.raises(UsageError, match=r"max_ranks is 1 in nbkit\.toml"):
        resized_pins(limited, machine, pins_on(machine, 2, cpu=True), 4)


def test_cores_of_cpu_ranks_are_divided_again() -> None:
    machine = gpus(0)
    two = pins_on(machine, 2, cpu=True)
    four = resized_pins(Site(), machine, two, 4)
    assert [len(pin.cores) for pin in four.pins] == [2] * 4
    assert [pin.threads for pin in resized_pins(Site(), machine, four, 1).pins] == [8]


def test_a_larger_cluster_takes_no_spare_and_no_retired_device() -> None:
    now = pins_on(gpus(4), gpus="0,1,2", spares=1)
    bad = pins_on(gpus(4), gpus="3").pins
    larger = resized_pins(Site(), gpus(5), replace(now, retired=bad), 3)
    assert [pin.label for pin in larger.pins] == ["GPU 0 A100", "GPU 1 A100", "GPU 4 A100"]
    assert (larger.spares, larger.retired) == (now.spares, bad)
    with pytest.raises(UsageError, match="0 idle"):
        resized_pins(Site(), gpus(4), replace(now, retired=bad), 3)

    cores = pins_on(gpus(0), 3, cpu=True, spares=1)
    assert [pin.cores for pin in cores.spares] == [(6, 7)]
    assert [pin.cores for pin in resized_pins(Site(), gpus(0), cores, 2).pins] == [(0, 1, 2), (3, 4, 5)]
