"""Test a device kind of another package, found by its entry point as if pip had installed it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nbkit.errors import UsageError
from nbkit.rank import device
from nbkit.rank.device import accelerator
from nbkit.rank.world import world
from nbkit.rank.world.rank_place import RankPlace, keep_local

LAMP = torch.device("xpu", 1)


def installs(folder: Path, value: str, patch: pytest.MonkeyPatch) -> None:
    """Write the metadata of a package with the entry point, and forget the device kinds found before."""
    package = folder / "imaginary-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: imaginary\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[nbkit.devices]\nimaginary = {value}\n")
    patch.syspath_prepend(str(folder))
    patch.setattr(device, "_kinds", dict(device._kinds))
    patch.setattr(device, "_plugins_are_read", False)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package, and make torch report two of its devices."""
    installs(tmp_path / "site", "tests.plugins.imaginary_device:Imaginary", monkeypatch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "IMAGINARY_QUEUES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # so that later changes of it are undone
    yield


def test_ranks_use_the_device_and_its_backend(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not accelerator().holds(LAMP)
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    place = RankPlace.from_env()
    assert (place.device, place.backend, place.torch_backend) == ("xpu", "xccl", "cpu:gloo,xpu:xccl")
    assert accelerator().holds(LAMP) and accelerator().uuid(LAMP) == "lamp-1"
    os.environ |= {"WORLD_SIZE": "3"}
    assert RankPlace.from_env().backend == "gloo"  # two ranks share a device
    assert device.is_device_backend("xccl") and not device.backend_times("xccl")

    keep_local("127.0.0.1")
    assert os.environ["IMAGINARY_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"]
    monkeypatch.setattr(world, "install", lambda: None)
    monkeypatch.setattr(world, "guard", lambda _: None)
    world.World(place)._prepare("127.0.0.1", 1)
    assert os.environ["IMAGINARY_QUEUES"] == "32" and "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_device_errors_are_distinguished_from_errors_of_the_program(installed: None) -> None:
    broken = RuntimeError("Imaginary error: the lamp has gone out")
    assert accelerator().failed(broken) == ""
    assert accelerator().kind == "xpu"
    assert accelerator().failed(broken) == str(broken) and not accelerator().failed(
        RuntimeError("the lamp has gone out")
    )
    assert accelerator().out_of_memory(RuntimeError("there is no room in the lamp"))


@pytest.mark.parametrize(("kind", "backend"), [("xpu", "nccl"), ("cuda", "xccl"), ("lamp", "gloo")])
def test_a_backend_of_another_device_kind_is_refused(installed: None, kind: str, backend: str) -> None:
    assert accelerator().kind == "xpu"
    with pytest.raises(UsageError, match=kind):
        RankPlace(0, 2, 0, 2, kind, backend)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("builtins:dict", "derives from nbkit.rank.device.DeviceKind(.|\n)*imaginary of nbkit.devices: builtins:dict"),
        ("nbkit.rank.device:DeviceKind", "with a name and a backend"),
        ("tests.plugins.nowhere:Lamp", "'imaginary' of an installed package cannot be loaded(.|\n)*nowhere"),
    ],
)
def test_an_unusable_class_is_reported_with_its_package_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    installs(tmp_path / "site", value, monkeypatch)
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"{said}(.|\n)*pip uninstall imaginary"):
            RankPlace(0, 2, 0, 2, "xpu", "gloo")


def test_ranks_use_the_cpu_without_the_package_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    assert (accelerator().kind, accelerator().backend, accelerator().count()) == ("cpu", "gloo", 0)
