"""The torch half of compress=: gradients are sent as int8 or bf16.

The error of the sums is bounded. With n ranks and gradients of S bytes in float32, each rank sends (n - 1) / n of S / 4
(int8) or S / 2 (bf16) bytes twice. Low-precision numbers are never added, unlike in an all-reduce:

    all-to-all    each rank receives its chunk of every rank's gradients, and adds them in float32
    all-gather    of the sums, which are rounded again

int8 numbers are x / scale. A scale is 1/127 of the largest absolute value of BLOCK elements, and takes 4 more bytes per
block. A rank keeps its rounding error and adds it before it rounds the next time (error feedback; Seide et al. 2014,
Karimireddy et al. 2019). This takes S bytes for the rank's own gradients and S / n for sums. Rebuilt buckets start with
no error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from nbkit.rank.parallel.data_parallel.buckets import all_gather
from nbkit.rank.parallel.data_parallel.ddp import GradientBucket, ReplicaSetup
from nbkit.techniques.compress import BLOCK


def apply(value: str, setup: ReplicaSetup) -> ReplicaSetup:
    """Return `setup` with compressed buckets. value: "bf16" or "int8"."""
    return replace(setup, bucket_class=partial(CompressedBucket, form=value))


class CompressedBucket(GradientBucket):
    """A bucket of compressed gradients. Row r of the exchanged matrix is the chunk that rank r adds.

    Each row ends with bytes that say which parameters have a gradient, and with the canary: see GradientBucket.
    """

    def __init__(self, params: list[nn.Parameter], setup: ReplicaSetup, *, form: str) -> None:
        super().__init__(params, setup)
        self.links, self.int8 = setup.links, form == "int8"
        self.size = self.gradients.numel()
        self.width = -(-self.size // self.links.ranks)
        self.blocks = -(-self.width // BLOCK)
        # The rounding errors of this rank's gradients, and of the sums of its chunk. None until the first rounding.
        self.off_own: Tensor | None = None
        self.off_sums: Tensor | None = None
        self.arriving: Tensor | None = None
        self.crossed = False

    @torch.no_grad()
    def launch(self) -> None:
        """Send each rank its chunk."""
        self.crossed = False
        chunks = self.flat.new_zeros(self.links.ranks * self.width, dtype=torch.float32)
        chunks[: self.size] = self.flat[: self.size]
        flags = self.used.to(torch.uint8).expand(self.links.ranks, -1)
        packed, self.off_own = self._packed(chunks.view(self.links.ranks, -1), self.off_own)
        leaving = torch.cat([packed, flags], 1)
        self.arriving = torch.empty_like(leaving)
        self.work = dist.all_to_all_single(self.arriving.view(-1), leaving.view(-1), group=self.group, async_op=True)

    @torch.no_grad()
    def advance(self) -> None:
        """Add the chunks that have arrived, and start to gather the sums."""
        if self.crossed:
            return
        assert self.work is not None and self.arriving is not None
        self.work.wait()
        flags = self.arriving[:, -self.used.numel() :]
        self.used.copy_(flags.sum(0, dtype=torch.float32))
        sums = self._unpacked(self.arriving[:, : -self.used.numel()]).sum(0, keepdim=True)
        packed, self.off_sums = self._packed(sums, self.off_sums)
        row = torch.cat([packed[0], flags[self.links.index, -1:]])
        self.arriving, self.work = all_gather(row, self.links)
        self.crossed = True

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the sums of all chunks and unpack them."""
        self.advance()
        assert self.work is not None and self.arriving is not None
        self.work.wait()
        self.flat[: self.size] = self._unpacked(self.arriving[:, :-1]).reshape(-1)[: self.size]
        alive = self.arriving[:, -1].sum(dtype=torch.float32).to(self.used.dtype)
        self.used[-1] = torch.minimum(self.used[-1], alive)
        self.arriving = None

    def _packed(self, rows: Tensor, off: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (float32 `rows` as rows of bytes, rounding error). Changes `rows`. off: the earlier error, which is
        added."""
        if not self.int8:
            return rows.to(torch.bfloat16).view(torch.uint8), None
        blocks = self._in_blocks(rows if off is None else rows.add_(off))
        # The scale is never zero. If a gradient is not finite, its scale and the result are not finite either.
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_(min=1e-30)
        numbers = (blocks / scales).round_().nan_to_num_(0.0, 0.0, 0.0)
        bytes_ = numbers.to(torch.int8).view(len(rows), -1)[:, : self.width]
        packed = torch.cat([scales.view(len(rows), -1).view(torch.uint8), bytes_.view(torch.uint8)], 1)
        # An error that is not finite would stay forever.
        taken = blocks.sub_(numbers.mul_(scales)).nan_to_num_(0.0, 0.0, 0.0)
        return packed, taken.view(len(rows), -1)[:, : self.width]

    def _unpacked(self, rows: Tensor) -> Tensor:
        if not self.int8:
            return rows.contiguous().view(torch.bfloat16).float()
        at = 4 * self.blocks
        scales = rows[:, :at].contiguous().view(torch.float32)
        numbers = self._in_blocks(rows[:, at:].view(torch.int8).float())
        return numbers.mul_(scales.unsqueeze(-1)).view(len(rows), -1)[:, : self.width]

    def _in_blocks(self, rows: Tensor) -> Tensor:
        padded = functional.pad(rows, (0, self.blocks * BLOCK - self.width))
        return padded.view(len(rows), self.blocks, BLOCK)
