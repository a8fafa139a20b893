"""What joins the GPUs of this machine, and its network cards that can read GPUs: for people, no choice hangs on it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbkit.wire import nvidia_smi

_PCIE = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the CPU's bridges",
    "SYS": "PCIe and the link between sockets",
}


@dataclass(frozen=True)
class Link:
    """kind: as nvidia-smi has it: "NV18" for 18 NVLinks, "PIX", "PXB", "PHB", "NODE", "SYS"."""

    first: int
    second: int
    kind: str


@dataclass(frozen=True)
class Adapter:
    """A port that is up. kind: "InfiniBand", or "Ethernet" for RoCE. rate: in Gb/s."""

    name: str
    kind: str
    rate: float


def gpu_links() -> tuple[Link, ...]:
    """From `nvidia-smi topo -m`; () where it is not there or has no answer (WSL)."""
    smi = nvidia_smi.find()
    try:
        return parse_topology(nvidia_smi.ask(smi, ["topo", "-m"])[0]) if smi else ()
    except (OSError, subprocess.SubprocessError):
        return ()


def parse_topology(table: str) -> tuple[Link, ...]:
    """The links between GPUs in the table of `nvidia-smi topo -m`, each pair once."""
    # The columns are GPUs, then network cards, then cores.
    found = []
    for cells in map(str.split, table.splitlines()):
        if len(cells) < 2 or not re.fullmatch(r"GPU\d+", cells[0]) or "X" not in cells:
            continue  # the head of the table, and what is explained below it
        row = int(cells[0].removeprefix("GPU"))
        found += [Link(column, row, cells[column + 1]) for column in range(cells.index("X") - 1)]
    return tuple(found)


def show_links(links: Sequence[Link]) -> str:
    """For people: "NVLink between all 8 (NV18)"; "" without a link."""
    kinds = list(dict.fromkeys(link.kind for link in links))
    gpus = {number for link in links for number in (link.first, link.second)}
    if len(kinds) == 1:
        among = f"all {len(gpus)}" if len(gpus) > 2 else "both"
        return f"{_in_words(kinds[0])} between {among} ({kinds[0]})"
    # The rarest last is not what people look for: NVLink is named with its pairs, what remains is PCIe.
    fast = [f"{link.first}-{link.second}" for link in links if link.kind.startswith("NV")]
    others = ", ".join(f"{_in_words(kind)} ({kind})" for kind in kinds if not kind.startswith("NV"))
    return f"NVLink between {', '.join(fast)}; else {others}" if fast else others


def _in_words(kind: str) -> str:
    return "NVLink" if kind.startswith("NV") else _PCIE.get(kind, "PCIe")


def network_adapters(root: Path = Path("/")) -> tuple[Adapter, ...]:
    """The ports in /sys/class/infiniband that are up."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        try:
            state, rate, kind = ((port / name).read_text().strip() for name in ("state", "rate", "link_layer"))
        except OSError:
            continue
        if state.endswith("ACTIVE"):
            found.append(Adapter(port.parents[1].name, kind, nvidia_smi.number(rate) or 0.0))
    return tuple(found)


def show_adapters(adapters: Sequence[Adapter]) -> str:
    """For people: "8 InfiniBand ports of 400 Gb/s (mlx5_0 to mlx5_7)"."""
    texts = []
    for kind, rate in dict.fromkeys((each.kind, each.rate) for each in adapters):
        names = [each.name for each in adapters if (each.kind, each.rate) == (kind, rate)]
        noun = "RoCE" if kind == "Ethernet" else kind
        ports = "1" if len(names) == 1 else str(len(names))
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        texts.append(f"{ports} {noun} port{'s' * (len(names) > 1)} of {rate:g} Gb/s ({span})")
    return ", ".join(texts)
