"""A rank's share of the state at one step, in one flat piece of host memory, as it is kept and as it travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbkit.planner.reshard.boxes import within
from nbkit.rank.device import accelerator
from nbkit.rank.torch_private import foreach_copy_
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.replace.backup_shares import Shares, beside
from nbkit.tensor_layout import Box, Layout

_ALIGN = 16


@dataclass(frozen=True)
class Contents:
    """What lies in a snapshot, in this order: key -> dtype and layout."""

    kinds: Mapping[str, torch.dtype]
    layouts: Mapping[str, Layout]

    @classmethod
    def of(cls, state: JobState, shares: Shares) -> Contents:
        """What `shares` name of `state`."""
        named = {key: key if key.startswith("buffer/") else key.partition("/")[2] for key in state}
        return cls.by_key(state, {key: shares[name] for key, name in named.items() if name in shares})

    @classmethod
    def by_key(cls, state: JobState, boxes: Mapping[str, Sequence[Box]]) -> Contents:
        """These boxes of `state`."""
        kinds, layouts = dict[str, torch.dtype](), dict[str, Layout]()
        known: dict[Layout, Layout] = {}
        for key, (tensor, layout) in state.items():
            if wanted := boxes.get(key):
                made = beside(layout.shape, wanted)
                kinds[key], layouts[key] = tensor.dtype, known.setdefault(made, made)
        return cls(kinds, layouts)

    @property
    def num_bytes(self) -> int:
        """Of the flat piece; it is never empty, since it is sent."""
        return _ALIGN + sum(_room(self.layouts[key], kind) for key, kind in self.kinds.items())

    def views(self, flat: Tensor) -> JobState:
        """The tensors that lie in `flat`."""
        found, at = {}, 0
        for key, kind in self.kinds.items():
            layout = self.layouts[key]
            part = flat[at : at + layout.numel * kind.itemsize].view(kind).view(layout.local)
            found[key] = part, layout
            at += _room(layout, kind)
        return found


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Of the host, for what is copied out of `device`."""
    if accelerator().holds(device):
        return accelerator().pinned((num_bytes,), torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _room(layout: Layout, kind: torch.dtype) -> int:
    return -(-layout.numel * kind.itemsize // _ALIGN) * _ALIGN


@torch.no_grad()
def copy_into(target: JobState, state: JobState) -> None:
    """Fill `target`, views of a snapshot, from what this rank holds."""
    on_device: tuple[list[Tensor], list[Tensor]] = [], []
    on_host: tuple[list[Tensor], list[Tensor]] = [], []
    for key, (tensor, layout) in target.items():
        whole, held = state[key]
        into, out_of = on_device if accelerator().holds(whole) else on_host
        for here, there in layout.pieces:
            into.append(tensor[here.slices])
            out_of.append(whole[_place(held, there)])
    if on_host[0]:
        foreach_copy_(*on_host)
    if on_device[0]:
        # As a foreach from a device to the host, each would be waited for.
        accelerator().fetch_into(*on_device)


def _place(layout: Layout, box: Box) -> tuple[slice, ...]:
    """Where `box` of the global tensor lies in the local one."""
    return next(box.moved(there.start, here.start).slices for here, there in layout.pieces if within(box, there))
