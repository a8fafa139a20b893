"""What else than the step itself took the memory, where the numbers tell: a leak, gaps, other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from nbkit.rank.device import accelerator
from nbkit.rank.train.out_of_memory import tensor_limit

LEVELS = 6
"""Steps in a row that begin with more than the one before, which show a leak."""
_SHARE = 0.02  # of what is in use, by which it has to have grown
_MUCH = 0.1  # of the device
_OWN = 10**9  # bytes that CUDA, cuBLAS and NCCL take in this process itself, beside torch's allocator


@dataclass(frozen=True)
class Seen:
    """Bytes on a rank's device when an allocation failed; 0 where nothing says.

    allocated: by tensors of this process. reserved: by torch's allocator, for them and for later ones. used: by all
    processes. levels: allocated, at the beginning of each of the last steps.
    """

    total: int = 0
    used: int = 0
    reserved: int = 0
    allocated: int = 0
    levels: Sequence[int] = ()

    def findings(self) -> list[str]:
        """Sentences; none where it is the step that is too large."""
        found = []
        last = list(self.levels)[-LEVELS:]
        grown = last[-1] - last[0] if last else 0
        rises = all(after > before for before, after in pairwise(last))
        if len(last) == LEVELS and rises and grown > _SHARE * last[-1]:
            found.append(
                f"live tensors grew by {_mb(grown / (LEVELS - 1))} a step over {LEVELS - 1} steps: "
                "something keeps them, such as a list of losses without .item()"
            )
        if (gaps := self.reserved - self.allocated) > _MUCH * self.total > 0:
            found.append(
                f"{_mb(gaps)} of {_mb(self.reserved)} that torch has reserved lie in gaps between tensors: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before %cluster start"
            )
        if (others := self.used - self.reserved - _OWN) > _MUCH * self.total > 0:
            found.append(f"{_mb(others)} of {_mb(self.total)} are held by others on this device: see nvidia-smi")
        return found


def level(device: torch.device) -> int:
    """Bytes that tensors of this rank take now; 0 where nothing says."""
    if accelerator().holds(device):
        return accelerator().memory(device)[0]
    limit = tensor_limit.in_force()
    return limit.now if limit is not None else 0


def look(device: torch.device, levels: Sequence[int]) -> Seen:
    """Now, while what the step has taken is still there. levels: see Seen."""
    if not accelerator().holds(device):
        return Seen(levels=tuple(levels))
    total, used, reserved = accelerator().occupied(device)
    return Seen(total, used, reserved, accelerator().memory(device)[0], tuple(levels))


def _mb(size: float) -> str:
    return f"{size / 1e6:,.4g} MB"
