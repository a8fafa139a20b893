"""All-gather of two ranks over gloo, without copies.

gloo's own brings all parts together in memory of its own, from where they are copied: three times the CPU time. Between
two ranks it is one exchange of as many bytes. Among more, gloo hands parts around a ring, which crosses a link between
two nodes less often than exchanges do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.comm.gloo.exchange import Exchange, swap


def _single(inner: Any, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work | None:
    """None where the inner group's own serves. Of how the tensors lie nothing follows: they may lie otherwise on the
    other rank, and the two would wait for different messages."""
    if opts is None or inner.size() != 2 or not source.numel():
        return None
    # What does not fit is left to torch's own checks and messages.
    if output.numel() != 2 * source.numel() or output.dtype != source.dtype:
        return None
    if any(tensor.device.type != "cpu" or tensor.is_sparse or tensor.is_complex() for tensor in (output, source)):
        return None
    if inner._get_backend(torch.device("cpu")).name() != "gloo":
        return None
    index, output, part = inner.rank(), output.detach(), source.detach().contiguous().view(-1)
    whole = output if output.is_contiguous() else output.new_empty(output.shape)
    rows = whole.view(2, -1)
    work: dist.Work = swap(inner, rows[1 - index], part, opts.timeout)
    if rows[index].data_ptr() != part.data_ptr():
        rows[index].copy_(part)
    return work if whole is output else Exchange([work], lambda: output.copy_(whole), [output])


INSTEAD: dict[str, Callable[..., dist.Work | None]] = {"all_gather_single": _single, "_allgather_base": _single}
