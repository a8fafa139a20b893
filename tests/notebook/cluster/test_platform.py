"""The platforms that nbkit supports, and the error on all others."""

from __future__ import annotations

import pytest

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.launch.platform_check import check_platform, release, starts_by_forking, torch_version

RIGHT = {"system": "linux", "python": (3, 11, 7), "torch": "2.13.0+cpu"}


def test_this_machine_is_supported() -> None:
    check_platform()
    assert release(torch_version()) >= (2, 11)


@pytest.mark.parametrize(
    "change",
    [{}, {"system": "darwin"}, {"python": (3, 14, 0)}, {"torch": "2.11.0"}, {"torch": "2.14.0a0+git1f2e3d4"}],
)
def test_linux_and_macos_with_new_enough_python_and_torch_are_supported(change: dict) -> None:
    check_platform(**{**RIGHT, **change})


@pytest.mark.parametrize(
    ("change", "number", "hint"),
    [
        ({"system": "win32"}, "this is win32", "wsl --install"),
        ({"python": (3, 10, 4)}, "Python 3.10.4, needed >= 3.11", "-m venv"),
        ({"torch": "2.9.1+cu128"}, "torch 2.9.1+cu128, needed >= 2.11", "pip install --upgrade"),
        ({"torch": ""}, "torch >= 2.11 is needed", "pip install torch"),
    ],
    ids=["windows", "old-python", "old-torch", "no-torch"],
)
def test_what_is_not_supported_is_told_with_the_numbers_and_what_to_type(change: dict, number: str, hint: str) -> None:
    with pytest.raises(ClusterError) as error:
        check_platform(**{**RIGHT, **change})

    assert number in error.value.numbers
    assert hint in error.value.hint


def test_macos_spawns_its_ranks() -> None:
    assert starts_by_forking("linux")
    assert not starts_by_forking("darwin")


@pytest.mark.parametrize(("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("2.14.0a0+git", (2, 14, 0)), ("", ())])
def test_a_version_is_read_up_to_its_last_number(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers
