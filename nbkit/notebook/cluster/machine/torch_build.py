"""Which torch is installed and what it is built for, read from its files: torch is not imported for it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from nbkit.notebook.cluster.launch.platform_check import torch_version

_NAMED = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
# What PyTorch's own page offers: "2.13.0", "2.13.0+cu128". Who built another chose its architectures.
_OFFICIAL = re.compile(r"\d+\.\d+\.\d+(\+cu\d+)?")


@dataclass(frozen=True)
class TorchBuild:
    """version: "2.13.0+cpu", "" where torch is not installed. cuda, hip, xpu: versions it is built for, "" without."""

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    @property
    def kind(self) -> str:
        """For people: what its GPUs are."""
        return "CUDA" if self.cuda else "ROCm" if self.hip else "XPU" if self.xpu else "the CPU"

    @property
    def is_official(self) -> bool:
        """Whether it has the architectures that PyTorch's wheels of its CUDA have."""
        return bool(_OFFICIAL.fullmatch(self.version))


def read_build() -> TorchBuild:
    """The torch that ranks will import."""
    version = torch_version()
    try:
        found = importlib.util.find_spec("torch") if version else None
        text = Path(found.origin or "").with_name("version.py").read_text() if found else ""
    except (OSError, ValueError):  # a namespace package; a torch that somebody has put into sys.modules
        text = ""
    return parse_build(version, text)


def parse_build(version: str, text: str) -> TorchBuild:
    """text: of torch/version.py, "" where it cannot be read; then the version's own end tells ("+cpu", "+cu128")."""
    if text:
        return TorchBuild(version, **dict(_NAMED.findall(text)))
    local = version.partition("+")[2]
    if digits := re.match(r"cu(\d+)(\d)$", local):
        return TorchBuild(version, cuda=f"{digits[1]}.{digits[2]}")
    if local.startswith("rocm"):
        return TorchBuild(version, hip=local.removeprefix("rocm"))
    if local == "xpu":
        return TorchBuild(version, xpu="unknown")
    return TorchBuild(version)
