"""Test that only one module knows the differences between kinds of devices, and it changes nothing on a CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nbkit
from nbkit.rank.device import Accelerator, accelerator

_PACKAGE = Path(nbkit.__file__).parent
_MAY_NAME_DEVICES = ("rank/device.py", "device_kinds.py", "rank/selftest/torchrun_script.py")
"""The last one is a program like a user's, which does not know nbkit."""
_CPU = torch.device("cpu")


def asks(tree: ast.AST) -> Iterator[str]:
    """Yield the parts of `tree` that ask for a kind of device, or use what only some kinds have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner == "torch" and node.attr in ("cuda", "accelerator", "Event", "Stream")) or node.attr == "is_cuda":
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', '') or ''}.{alias.name}".strip(".") for alias in node.names]
            yield from (f"{node.lineno}: {n}" for n in names if n.startswith(("torch.cuda", "torch.accelerator")))
        elif isinstance(node, ast.Constant) and node.value in ("cuda", "nccl"):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield f"{node.value.lineno}: pin_memory={ast.unparse(node.value)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device":
            if any(isinstance(each, ast.Constant) and "cuda" in str(each.value) for each in node.args):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_device_errors_are_distinguished_from_errors_of_the_program() -> None:
    said = "CUDA error: uncorrectable ECC error encountered"
    ecc = RuntimeError(f"{said}\nCUDA kernel errors might be reported later")
    assert accelerator().failed(ecc) == accelerator().context_lost(ecc) == said
    index = RuntimeError("CUDA error: device-side assert triggered")
    assert accelerator().context_lost(index) == str(index) and not accelerator().failed(index)
    assert not accelerator().failed(RuntimeError("hardware error"))  # an error of the program


def test_only_the_device_modules_name_cuda_or_its_backend() -> None:
    found = []
    for file in sorted(_PACKAGE.rglob("*.py")):
        if str(file.relative_to(_PACKAGE)) not in _MAY_NAME_DEVICES:
            found += [f"{file.relative_to(_PACKAGE)}:{ask}" for ask in asks(ast.parse(file.read_text()))]

    assert not found, "ask nbkit.rank.device.accelerator() instead"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "x.is_cuda",
        "x.device.type == 'cuda'",
        "d != 'cuda'",
        "kinds = {'gloo', 'nccl'}",
        "torch.empty(2, pin_memory=True)",
        "import torch.cuda",
        "from torch.cuda import Event",
        "torch.accelerator.synchronize()",
        "torch.device('cuda:0')",
        "torch.Stream()",
    ],
)
def test_each_way_to_ask_for_a_device_is_found(line: str) -> None:
    assert list(asks(ast.parse(line)))


def test_a_cpu_accelerator_holds_no_cpu_tensor_and_copies_nothing() -> None:
    here, tensor = accelerator(), torch.ones(2)

    assert type(here) is Accelerator
    assert (here.kind, here.count(), here.device("cpu"), here.uuid(_CPU)) == ("cpu", 0, _CPU, "")
    assert not any(here.holds(what) for what in (tensor, _CPU, None, torch.device("meta")))
    assert here.holds(torch.device("cuda", 1))
    assert here.send(tensor, _CPU) is tensor
    here.seed(1)
    before = torch.get_rng_state()
    with here.generators_kept([_CPU]):
        torch.rand(2)
    assert torch.equal(before, torch.get_rng_state())
