"""Gradients that travel as int8 or bf16: fewer bytes than they have, and sums that are off within a bound.

Of gradients of n ranks that are S bytes in float32, (n - 1) / n of S / 4 (int8) or S / 2 (bf16) leave every rank twice,
as bytes, and no step of an all-reduce adds numbers of few bits:

    all-to-all    each rank gets its chunk of every rank's gradients, and adds them in float32
    all-gather    of the sums, rounded again

int8 is x / scale, a scale being 1/127 of the largest of BLOCK elements: 4 more bytes for each. What rounding takes off
is kept, on the rank that rounded, and added before it rounds the next time (error feedback; Seide et al. 2014,
Karimireddy et al. 2019): S bytes of own gradients, S / n of sums. Buckets that are built anew begin without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from nbkit.levers import BLOCK, Levers
from nbkit.rank.parallel.data_parallel.bucket_collectives import Links, all_gather
from nbkit.rank.parallel.data_parallel.ddp import GradientBucket, Replicas


class CompressedBucket(GradientBucket):
    """One bucket. Row r of what is exchanged is the chunk that rank r adds.

    Behind a row come, as bytes, which parameters have a gradient and the canary: see GradientBucket.
    """

    def __init__(self, params: list[nn.Parameter], links: Links, form: str) -> None:
        super().__init__(params, links.group)
        self.links, self.int8 = links, form == "int8"
        self.size = self.flat.numel() - self.used.numel()
        self.width = -(-self.size // links.ranks)
        self.blocks = -(-self.width // BLOCK)
        # What rounding has taken off this rank's gradients, and off the sums of its chunk; made when it is there.
        self.off_own: Tensor | None = None
        self.off_sums: Tensor | None = None
        self.arriving: Tensor | None = None
        self.crossed = False

    @torch.no_grad()
    def launch(self) -> None:
        """Each rank its chunk."""
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
        """The chunks have come: add them, and start to bring the sums together."""
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
        """The sums of all chunks have come."""
        self.advance()
        assert self.work is not None and self.arriving is not None
        self.work.wait()
        self.flat[: self.size] = self._unpacked(self.arriving[:, :-1]).reshape(-1)[: self.size]
        alive = self.arriving[:, -1].sum(dtype=torch.float32).to(self.used.dtype)
        self.used[-1] = torch.minimum(self.used[-1], alive)
        self.arriving = None

    def _packed(self, rows: Tensor, off: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(float32 `rows`, changed, as rows of bytes; what that takes off). off: taken off before, and added now."""
        if not self.int8:
            return rows.to(torch.bfloat16).view(torch.uint8), None
        blocks = self._in_blocks(rows if off is None else rows.add_(off))
        # Never zero. Where a gradient is not finite its scale is not either, nor what becomes of it.
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_(min=1e-30)
        numbers = (blocks / scales).round_().nan_to_num_(0.0, 0.0, 0.0)
        bytes_ = numbers.to(torch.int8).view(len(rows), -1)[:, : self.width]
        packed = torch.cat([scales.view(len(rows), -1).view(torch.uint8), bytes_.view(torch.uint8)], 1)
        # What is not finite would stay for ever.
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


class CompressedReplicas(Replicas):
    """Replicas whose gradients travel as `levers` say."""

    def __init__(self, model: nn.Module, links: Links, levers: Levers) -> None:
        self._links, self._form = links, levers.compress
        super().__init__(model, world_size=links.ranks, group=links.group, bucket=levers.bucket)

    def _bucket(self, names: Sequence[str]) -> GradientBucket:
        return CompressedBucket([self._params[name] for name in names], self._links, self._form)
