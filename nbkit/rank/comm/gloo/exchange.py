"""Bytes that two ranks swap over gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def options(timeout: timedelta) -> dist.AllToAllOptions:
    """Of an exchange that is waited for so long."""
    found = dist.AllToAllOptions()
    found.timeout = timeout
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor, flat: what gloo carries does not depend on what it can add."""
    return tensor.view(-1).view(torch.uint8)


def swap(inner: Any, received: Tensor, sent: Tensor, timeout: timedelta) -> Any:
    """Start to send `sent` to the other rank of a group of two, and to receive as much. Returns gloo's handle."""
    splits = [0, 0]
    splits[1 - inner.rank()] = sent.nbytes
    return inner.alltoall_base(as_bytes(received), as_bytes(sent), splits, splits, options(timeout))
