"""The parameters of one unit of ZeRO 3: their rows, which an all-gather sends, and the memory of the whole ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.base import Place
from nbkit.rank.parallel.data_parallel.bucket_collectives import Links, Reduction, all_gather
from nbkit.rank.parallel.data_parallel.bucket_packing import Packing, aligned, flat_with_views
from nbkit.rank.parallel.module.meta_module import parameter_like
from nbkit.rank.parallel.reshard.resizable_storage import emptied
from nbkit.rank.parallel.zero3.gather_dtypes import Casts
from nbkit.rank.parallel.zero3.placeholder import NotGathered
from nbkit.tensor_layout import Layout


class Slot:
    """One parameter of a unit: `shard` at rest, `whole` while it is used, at all `places` that share it.

    cast: used in place of `whole` in passes under autocast, where it is gathered in that dtype. absent: stands there
    while something runs that does not have it.
    """

    def __init__(self, name: str, places: Sequence[Place], layout: Layout) -> None:
        self.name, self.places, self.layout = name, places, layout
        self.old: nn.Parameter = getattr(*places[0])
        self.shard: nn.Parameter
        self.whole: nn.Parameter
        self.cast: nn.Parameter | None = None
        self.absent: NotGathered
        self.grad: Tensor | None = None

    @property
    def used(self) -> list[nn.Parameter]:
        """What a pass may use it as."""
        return [self.whole] if self.cast is None else [self.whole, self.cast]

    def widen(self) -> None:
        """Add the gradient of `cast` to that of `whole`, in its dtype."""
        if self.cast is not None and (grad := self.cast.grad) is not None:
            self.cast.grad = None
            grad = grad.to(self.whole.dtype)
            self.whole.grad = grad if self.whole.grad is None else self.whole.grad.add_(grad)


class _Wholes:
    """Whole parameters of one dtype, in memory that comes and goes."""

    def __init__(self, slots: Sequence[Slot], like: Tensor) -> None:
        flat, self.flats = flat_with_views([slot.layout.local for slot in slots], like)
        # .data: filling it again must not look to autograd like a change of what it saved.
        views = [flat.view(slot.layout.local).data for slot, flat in zip(slots, self.flats, strict=True)]
        self.params = [parameter_like(view, slot.old) for slot, view in zip(slots, views, strict=True)]
        self._storage = flat.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self.free()

    def take(self) -> None:
        """Memory, for what is to be filled."""
        self._storage.resize_(self._num_bytes)

    def free(self) -> None:
        """Let it go."""
        self._storage.resize_(0)


class _Run:
    """Neighbours in the rows of a part that are gathered in one dtype. at, at_byte: where they begin in a row.

    cast: the dtype in passes under autocast, None where it is that of the parameters.
    """

    def __init__(
        self, slots: list[Slot], ranks: int, like: Tensor, at: int, at_byte: int, cast: torch.dtype | None
    ) -> None:
        self.slots, self.at, self.at_byte, self.dtype = slots, at, at_byte, cast or like.dtype
        self.packing = Packing.of([slot.layout.local for slot in slots], ranks, like)
        self.num_bytes = self.packing.width * self.dtype.itemsize
        self.wholes = _Wholes(slots, like)
        self.casts = self.wholes if cast is None else _Wholes(slots, like.new_empty(0, dtype=cast))
        for i, slot in enumerate(slots):
            slot.whole = self.wholes.params[i]
            slot.cast = None if cast is None else self.casts.params[i]

    def columns(self, rows: Tensor) -> Tensor:
        """Its own of one row or several: of elements, or of bytes under autocast."""
        if rows.dtype == torch.uint8:
            return rows[..., self.at_byte : self.at_byte + self.num_bytes].view(self.dtype)
        return rows[..., self.at : self.at + self.packing.width]


class Part:
    """The parameters of a unit that have one dtype and device."""

    def __init__(self, slots: list[Slot], links: Links, casts: Casts | None) -> None:
        self.slots, self.links = slots, links
        self.like = slots[0].old.detach().new_empty(0)
        # Autocast leaves other dtypes alone.
        names = casts.names if casts is not None and self.like.dtype == torch.float32 else frozenset()
        first, rest = [s for s in slots if s.name in names], [s for s in slots if s.name not in names]
        self.runs: list[_Run] = []
        width = num_bytes = 0
        for some, cast in ((first, casts.dtype if casts is not None else None), (rest, None)):
            if some:
                at, at_byte = aligned(width, self.like), aligned(num_bytes, self.like.new_empty(0, dtype=torch.uint8))
                run = _Run(some, links.ranks, self.like, at, at_byte, cast)
                width, num_bytes = at + run.packing.width, at_byte + run.num_bytes
                self.runs.append(run)
        self.may_cast, self._num_bytes = bool(first), num_bytes
        self.mine = self.like.new_zeros(width)
        for run in self.runs:
            for i, slot in enumerate(run.slots):
                slot.shard = parameter_like(run.packing.shard(run.columns(self.mine), i, links.index), slot.old)
        emptied(self.mine)
        self.arriving: tuple[Tensor, Tensor, dist.Work] | None = None
        self.is_cast = False
        self.trained: list[Slot] = []
        self.reduction: Reduction | None = None
        self.sums: Tensor | None = None
        self.num_passes = 0
        self.never_here: set[int] = set()

    def gather(self, autocast: bool) -> None:
        """Send the all-gather. autocast: what can be is cast before."""
        self.is_cast = autocast and self.may_cast
        row = self._row_of_bytes() if self.is_cast else self.mine
        self.arriving = row, *all_gather(row, self.links)

    @torch.no_grad()
    def _row_of_bytes(self) -> Tensor:
        row = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.like.device)
        for run in self.runs:
            run.columns(row).copy_(run.columns(self.mine))
        return row

    def fill(self) -> None:
        """Fill the whole parameters with what arrives."""
        assert self.arriving is not None
        _, matrix, work = self.arriving
        work.wait()
        for run in self.runs:
            wholes = run.casts if self.is_cast else run.wholes
            wholes.take()
            run.packing.unpack(run.columns(matrix), wholes.flats)
        self.arriving = None

    def free(self) -> None:
        """Let the memory of whole parameters go."""
        for run in self.runs:
            run.wholes.free()
            run.casts.free()

    def train(self) -> None:
        """Follow what is frozen now."""
        trained = [slot for slot in self.slots if slot.shard.requires_grad]
        for slot in self.slots:
            for param in slot.used:
                param.requires_grad_(slot.shard.requires_grad)
            slot.absent.follow(slot.shard.requires_grad)
        if trained == self.trained:
            return
        self.trained, self.reduction, self.sums = trained, None, None
        if trained:
            packing = Packing.of([slot.layout.local for slot in trained], self.links.ranks, self.like)
            self.reduction = Reduction(packing, self.links, self.like)
            self.sums = self.like.new_zeros(packing.width + len(trained))
            for i, slot in enumerate(trained):
                slot.grad = packing.shard(self.sums, i, self.links.index)
            emptied(self.sums)

    def let_go(self) -> None:
        """Give up the memory of gradients; `train` takes it anew."""
        self.trained, self.reduction, self.sums = [], None, None
        for slot in self.slots:
            slot.grad = slot.shard.grad = slot.whole.grad = None

    def landed(self, row: Tensor) -> None:
        """Add the sums of one pass, and the counts behind them, to those of the passes before."""
        assert self.sums is not None and self.reduction is not None
        if self.num_passes:
            self.sums.add_(row)
            self.never_here &= self.reduction.unused
        else:
            self.sums.copy_(row)
            self.never_here = self.reduction.unused
        self.num_passes += 1

    def give(self) -> None:
        """The optimizer gets the sums. Only a rank that left a parameter unused looks at the counts."""
        if self.sums is None:
            return
        counts = self.sums[-len(self.trained) :].tolist() if self.never_here else []
        for i, slot in enumerate(self.trained):
            slot.shard.grad = None if i in self.never_here and counts[i] == 0 else slot.grad
