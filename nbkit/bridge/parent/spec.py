"""The specification of a cluster. The notebook writes it to disk; the parent and the ranks read it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbkit.rank.world.world import RankPlace
from nbkit.wire.processes import Process

_DEVICES = ("pins", "spares", "retired")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RankPin:
    """The device, cores and threads of a rank.

    env: variables to set before the rank does anything else. cores: CPU cores to bind to; () for all. threads: the
    number of threads of torch. label, why: the device and the reason for it, in words.
    """

    env: dict[str, str]
    cores: tuple[int, ...]
    threads: int
    label: str = ""
    why: str = ""


@dataclass(frozen=True)
class CoordinatorAddress:
    """The connection to the coordinator of a cluster on several hosts; see SignedLink.

    fd: file descriptor of the open connection. key, sent, received: state of the link, from the previous process.
    """

    fd: int
    key: str
    sent: int
    received: int


@dataclass(frozen=True)
class EngineSpec:
    """The specification of a cluster for one of its hosts.

    folder: the cluster's folder. engine_file: the controller's connection file for engines. It may not exist yet.

    base, world_size: the first rank of this host, and the number of ranks of all hosts. pins: one for each rank of this
    host. spares: devices in reserve. retired: devices that ranks were moved away from.

    ttl: seconds without a notebook and without a running cell after which the cluster ends. launcher: the notebook's
    process; if it ends, the start is given up. forked: True if ranks are forks of the parent, False if each is a new
    process. address: the address of this host at which its ranks may listen. port: the port of the first generation's
    store; the parent sets it. hosts: every address of every host; only these may connect to a store. () if this is the
    only host. line: None if all ranks are on the notebook's host. Otherwise the ranks register first, and form the
    world when the notebook says so.
    """

    name: str
    folder: str
    profile_dir: str
    engine_file: str
    backend: str
    device: str
    pins: tuple[RankPin, ...]
    ttl: float
    launcher: Process
    forked: bool
    address: str = "127.0.0.1"
    port: int = 0
    base: int = 0
    world_size: int = 0
    line: CoordinatorAddress | None = None
    hosts: tuple[str, ...] = ()
    spares: tuple[RankPin, ...] = ()
    retired: tuple[RankPin, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", self.world_size or len(self.pins))

    @property
    def ranks(self) -> range:
        """Return the ranks of this host."""
        return range(self.base, self.base + len(self.pins))

    def pin(self, rank: int) -> RankPin:
        return self.pins[rank - self.base]

    @property
    def sees_all_gpus(self) -> bool:
        """Return True if each rank sees the GPUs of all ranks of its host, in rank order, as under torchrun.

        A rank sees only its own GPU if ranks share a GPU or have MIG instances: CUDA shows a process only one instance.
        """
        given = [pin.env.get(_VISIBLE, "") for pin in self.pins]
        return all(uuid.startswith("GPU-") for uuid in given) and len(set(given)) == len(given)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables for the devices of `rank`."""
        own = self.pin(rank).env
        return {**own, _VISIBLE: ",".join(pin.env[_VISIBLE] for pin in self.pins)} if self.sees_all_gpus else own

    def place(self, rank: int) -> RankPlace:
        return RankPlace(
            rank=rank,
            world_size=self.world_size,
            # Code written for torchrun computes on cuda:LOCAL_RANK. For a rank that sees only its own GPU it is cuda:0.
            local_rank=rank - self.base if self.device == "cpu" or self.sees_all_gpus else 0,
            local_world_size=len(self.pins),
            device=self.device,
            backend=self.backend,
        )


def read(path: Path, **changes: Any) -> EngineSpec:
    """Return the spec at `path`, with `changes`."""
    fields = {**json.loads(path.read_text()), **changes}
    fields |= {key: pins_of(fields.get(key, ())) for key in _DEVICES}
    line = CoordinatorAddress(**line) if (line := fields.pop("line", None)) else None
    hosts = tuple(fields.pop("hosts", ()))
    return EngineSpec(launcher=Process(**fields.pop("launcher")), line=line, hosts=hosts, **fields)


def pins_of(saved: Iterable[Mapping[str, Any]]) -> tuple[RankPin, ...]:
    """Return the pins that were saved as JSON."""
    return tuple(RankPin(**{**pin, "cores": tuple(pin["cores"])}) for pin in saved)


def write_pins(spec: EngineSpec, path: Path) -> None:
    """Write the devices of `spec` to `path`, for ranks that are not forked, and for the notebook."""
    saved = json.loads(path.read_text()) | {key: [asdict(pin) for pin in getattr(spec, key)] for key in _DEVICES}
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(saved))
    scratch.replace(path)
