"""The place of a process in the world, and the network that it may use."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import warnings
from dataclasses import dataclass

import torch

from nbkit.device_kinds import CPU, GLOO
from nbkit.errors import UsageError
from nbkit.rank.device import accelerator, backends, find_kind, interface_variables, kind_names


@dataclass(frozen=True)
class RankPlace:
    """The place of a process in the world. device: the kind of its device, or "cpu". backend: torch's name."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str
    backend: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world_size:
            raise UsageError(
                "A rank must lie within its world.",
                numbers=f"rank {self.rank} of {self.world_size}, local {self.local_rank} of {self.local_world_size}",
            )
        kind = find_kind(self.device)
        if (kind is None and self.device != CPU) or self.backend not in backends():
            raise UsageError(
                "nbkit does not know this kind of device, or this backend.",
                numbers=f"got {self.device}, {self.backend}; devices cpu, {', '.join(kind_names())}, "
                f"backends {', '.join(sorted(backends()))}",
            )
        if self.backend not in (GLOO, kind and kind.backend):
            raise UsageError(
                f"The backend {self.backend} cannot send tensors of this device.",
                numbers=f"device {self.device}",
                hint=f'backend="{GLOO}"',
            )

    @classmethod
    def from_env(cls) -> RankPlace:
        """Return the place given by RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.

        Without RANK, return the place in a world of one process.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        device = accelerator().kind
        # nccl refuses two ranks on one GPU.
        backend = accelerator().backend if device != CPU and accelerator().count() >= local_size else GLOO
        return cls(rank, size, local_rank, local_size, device, backend)

    def roles(self) -> dict[str, str]:
        """Return the other variables that torchrun sets, for hosts with equal numbers of ranks and a first start."""
        size, local = self.world_size, self.local_world_size
        return {
            "GROUP_RANK": str((self.rank - self.local_rank) // local),
            "GROUP_WORLD_SIZE": str(-(-size // local)),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(size),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }

    def gpu(self, *, num_gpus: int, bound: torch.device | None = None, current: int = 0) -> int:
        """Return the index of this rank's GPU among `num_gpus` visible ones.

        bound: the device in the user's init_process_group(device_id=...). current: the device chosen by the user's
        set_device. 0 may also mean that nothing was chosen.
        """
        if bound is not None and bound.index is not None:
            return bound.index
        return current or self.local_rank % num_gpus

    def warn_of_gloo(self, *, num_gpus: int) -> None:
        """Warn if gloo was chosen because this process sees fewer GPUs than there are ranks on its host."""
        kind = find_kind(self.device)
        if kind is not None and self.backend == GLOO and self.local_rank == 0:
            warnings.warn(
                f"nbkit uses {GLOO}, not {kind.backend}, because this host has {self.local_world_size} ranks, and "
                f"this rank sees {num_gpus} GPU{'s' * (num_gpus > 1)}. If every rank has its own GPU, call "
                f"dist.init_process_group('{_with_host(kind.name, kind.backend)}') before nbkit",
                stacklevel=2,
            )

    @property
    def message_device(self) -> torch.device:
        """Return the device for messages between ranks. gloo would read GPU memory as if it were host memory."""
        return accelerator().device(CPU if self.backend == GLOO else self.device)

    @property
    def torch_backend(self) -> str:
        """Return the backend string for torch. It adds gloo for CPU tensors to the backend of a device."""
        return GLOO if self.backend == GLOO else _with_host(self.device, self.backend)


def _with_host(device: str, backend: str) -> str:
    return f"{CPU}:{GLOO},{device}:{backend}"


def open_listener(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket listening at `address` on a free port. Rank 0 serves the store of a generation on it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=2048)


def keep_local(address: str) -> None:
    """Restrict the backends to loopback if `address` is loopback. They would choose an interface by host name."""
    with contextlib.suppress(ValueError):
        if address == "localhost" or ipaddress.ip_address(address).is_loopback:
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            for variable in ("GLOO_SOCKET_IFNAME", *interface_variables()):
                os.environ.setdefault(variable, loopback)
