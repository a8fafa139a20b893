"""Data parallelism: every rank holds the whole model, and gradients are summed over the ranks while backward runs.

On the wire, per step: one all-reduce of each bucket, together the bytes of all gradients. Over several nodes it has two
levels (buckets.py). Compressed gradients are fewer bytes.

It is simpler than torch's DistributedDataParallel, and is correct in more cases. It *sums*: the loss carries the
weights, so ragged batches and masks average as on one process. A rank without rows and parameters without gradient take
part with zeros. A backward pass that was broken off leaves nothing behind.

Compressed gradients travel as int8 or bf16. The sums are off within a bound. With gradients of n ranks that are S bytes
in float32, (n - 1) / n of S / 4 (int8) or S / 2 (bf16) leave every rank twice, as bytes. So no step of an all-reduce
adds numbers of few bits:

    all-to-all    each rank gets its chunk of every rank's gradients, and adds them in float32
    all-gather    of the sums, rounded again

int8 is x / scale, where a scale is 1/127 of the largest of BLOCK elements: 4 more bytes for each block. The rounding
error is kept on the rank that rounded, and is added before it rounds the next time (error feedback; Seide et al. 2014,
Karimireddy et al. 2019). This takes S bytes for own gradients and S / n for sums. Rebuilt buckets begin without it.

Local steps: replicas train apart and are averaged now and then: local SGD (Stich 2019), with slow momentum (Wang et al.
2020). Each makes `every` steps with the gradients of its own rows. Then weights are averaged: one all-reduce of the
bytes of all parameters in `every` steps. Each replica keeps its own optimizer state. The step multiplies the loss by
`apart`, so that a replica's gradient is that of a mean. The mean over the replicas is then the gradient of the whole
batch.

For an optimizer whose steps do not grow with the gradients, such as Adam, the mean falls behind one process. A
replica's gradients are noisier by the square root of the replicas. So the common part of their steps is smaller by the
same factor (Malladi et al. 2022). There, from one average to the next, the weights move by a momentum of their
movements. Its sum is larger by that root: 1 / (1 - momentum). Every rank computes it from the averages alone. It
restarts at a switch, at a load and after a step that breaks. For SGD the mean already is the step of the mean gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from nbkit.errors import TrainingError
from nbkit.levers import BLOCK, BUCKET, Levers
from nbkit.rank.parallel.data_parallel.buckets import Bucket, BucketedAxis, Links, TwoLevelSum, all_gather, all_reduce
from nbkit.rank.parallel.device_mesh import LevelGroups
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.tensor_layout import Layout

ALIVE = 2.0
"""The canary of a finished reduction, in any dtype and for any number of ranks."""


class GradientBucket(Bucket):
    """Gradients of neighbouring parameters in one flat tensor.

    Behind the gradients, `used[i]` counts the ranks on which parameter i has one. A parameter that no rank used keeps
    `grad` None, as on one process, so that weight decay does not change it. The last element is the canary. Ranks 0 and
    1 give 1, the others 0. So it is ALIVE if the sum was made, and 1 or 0 if it was broken off.
    """

    def __init__(
        self, params: list[nn.Parameter], group: dist.ProcessGroup | None, levels: LevelGroups | None = None
    ) -> None:
        self.group, self.levels = group, levels
        sizes = [p.numel() for p in params]
        # All of it is written before it is sent.
        self.flat = torch.empty(sum(sizes) + len(sizes) + 1, dtype=params[0].dtype, device=params[0].device)
        *pieces, self.used = self.flat.split([*sizes, len(sizes) + 1])
        super().__init__(params, [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)])
        emptied(self.flat)
        self.unused: list[int] = []
        self.work: dist.Work | TwoLevelSum | None = None

    def send(self) -> None:
        self.adopt()
        self.used.fill_(1)
        if (dist.get_rank() if self.group is None else self.group.rank()) > 1:
            self.used[-1].fill_(0)  # assigning a number to an element would copy from the host, which waits
        self.unused = [i for i, p in enumerate(self.params) if p.grad is None]
        for i in self.unused:
            self.used[i].fill_(0)
            self.params[i].grad = self.views[i].zero_()
        self.launch()

    def launch(self) -> None:
        """Start the sum of `flat`."""
        self.work = all_reduce(self.flat, -1, self.group, self.levels)

    def advance(self) -> None:
        """Start the next operation of a sum that takes several."""
        if isinstance(self.work, TwoLevelSum):
            self.work.advance()

    def land(self) -> None:
        """Order later work behind the sum."""
        assert self.work is not None
        self.work.wait()

    def receive(self) -> None:
        """Order later work behind the all-reduce. Only a rank that left a parameter unused reads the counts."""
        self.land()
        self.work = None
        counts = self.used.tolist() if self.unused else []
        for i in self.unused:
            if counts[i] == 0:
                self.params[i].grad = None


class Replicas(BucketedAxis[GradientBucket]):
    """Sums the gradients of `model` over the `world_size` ranks of a group; None is the world.

    levels: the two levels of that group, if it has them. On one rank it does nothing, and gradients stay where autograd
    puts them.
    """

    _takes_memory = True

    def __init__(
        self,
        model: nn.Module,
        *,
        world_size: int,
        group: dist.ProcessGroup | None = None,
        levels: LevelGroups | None = None,
        bucket: int = BUCKET,
    ) -> None:
        super().__init__(dict(model.named_parameters()), bucket=bucket)
        self._homes = homes(model)
        self.world_size, self.group, self.levels = world_size, group, levels
        self.begin_again()

    def lay_out(self, layouts: Mapping[str, Layout]) -> None:
        """Register every parameter. Every rank holds all of them, in the given `layouts`."""
        for name, param in self._params.items():
            self._add(name, param, layouts[name], (param.data, layouts[name]), param, self._homes[name])

    def begin_again(self) -> None:
        # Ranks that were interrupted may have different buckets.
        self._arrived: list[str] | None = []
        super().begin_again()

    def start(self) -> None:
        super().start()
        for bucket in self._buckets:
            bucket.work = None

    def finish(self) -> Tensor | None:
        """Return the canary of the last reduction, on the device. It is ALIVE if that one and all before it were made.

        On a GPU nothing else shows this, because an aborted reduction raises no error here. None if nothing is reduced.
        """
        self._send_rest()
        for i, bucket in enumerate(self._buckets):
            for under_way in self._buckets[i:]:
                under_way.advance()
            bucket.receive()
        canary = self._buckets[-1].used[-1] if self._buckets else None
        self._follow_arrival()
        return canary

    def _bucket(self, names: Sequence[str]) -> GradientBucket:
        return GradientBucket([self._params[name] for name in names], self.group, self.levels)

    def _build(self, order: Sequence[str]) -> None:
        super()._build(order if self.world_size > 1 else ())

    def _send_next(self) -> None:
        # Keep one order on all ranks: later operations of a bucket start before the next bucket is sent.
        for earlier in self._buckets[: self._next]:
            earlier.advance()
        super()._send_next()

    def _arrive(self, name: str) -> None:
        super()._arrive(name)
        if self._arrived is not None:
            self._arrived.append(name)

    def _follow_arrival(self) -> None:
        """Rebuild the buckets once, after the first step, in the order in which gradients arrived on the group's first
        rank."""
        if self._arrived is None or self.world_size == 1:
            return
        seen, self._arrived = self._arrived, None
        names = list(self._params)
        order = [names.index(name) for name in dict.fromkeys([*seen, *self._backward_order()])]
        agreed = torch.tensor(order, dtype=torch.int64, device=self._params[names[0]].device)
        dist.broadcast(agreed, group_src=0, group=self.group)
        grads = [p.grad for p in self._params.values()]
        self._build([names[i] for i in agreed.tolist()])
        for p, grad in zip(self._params.values(), grads, strict=True):
            p.grad = grad


def broadcast_from_first(model: nn.Module, *, world_size: int) -> None:
    """Give every rank rank 0's parameters and buffers. Raise TrainingError if the ranks built different models."""
    if world_size == 1:
        return
    tensors = list(chain(model.named_parameters(), model.named_buffers()))
    described = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors]
    everyone: list[list[tuple[str, tuple[int, ...], str]]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, described)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            first = next((pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1]), None)
            raise TrainingError(
                f"Rank {rank} built another model than rank 0.",
                numbers=f"rank 0: {first[0]}, rank {rank}: {first[1]}"
                if first
                else f"tensors: {len(everyone[0])} on rank 0, {len(theirs)} on rank {rank}",
                hint="build the same model on every rank: nothing in it may depend on the rank",
            )
    broadcast(model, src=0)


@torch.no_grad()
def broadcast(model: nn.Module, *, src: int) -> None:
    """Give every rank the parameters and buffers of rank `src`."""
    for tensor in chain(model.parameters(), model.buffers()):
        # Send bytes, because gloo supports neither bool nor every float.
        raw = tensor.detach().contiguous()
        dist.broadcast(raw.reshape(-1).view(torch.uint8), src=src)
        if raw.data_ptr() != tensor.data_ptr():
            tensor.copy_(raw)


class CompressedBucket(GradientBucket):
    """A bucket of compressed gradients. Row r of what is exchanged is the chunk that rank r adds.

    Behind a row follow, as bytes, which parameters have a gradient, and the canary: see GradientBucket.
    """

    def __init__(self, params: list[nn.Parameter], links: Links, form: str) -> None:
        super().__init__(params, links.group)
        self.links, self.int8 = links, form == "int8"
        self.size = self.flat.numel() - self.used.numel()
        self.width = -(-self.size // links.ranks)
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
        """Return (float32 `rows` as rows of bytes, the rounding error). It changes `rows`. off: the earlier error,
        added now."""
        if not self.int8:
            return rows.to(torch.bfloat16).view(torch.uint8), None
        blocks = self._in_blocks(rows if off is None else rows.add_(off))
        # The scale is never zero. If a gradient is not finite, neither is its scale, nor the result.
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_(min=1e-30)
        numbers = (blocks / scales).round_().nan_to_num_(0.0, 0.0, 0.0)
        bytes_ = numbers.to(torch.int8).view(len(rows), -1)[:, : self.width]
        packed = torch.cat([scales.view(len(rows), -1).view(torch.uint8), bytes_.view(torch.uint8)], 1)
        # An error that is not finite would stay for ever.
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


def momentum(replicas: int) -> float:
    """Return the momentum of the movement from one average to the next."""
    return float(1 - replicas**-0.5)


class LocalSteps(Replicas):
    """`replicas` of `model` over the group `across`, averaged after `every` steps since the last average.

    momentum: of the movement from one average to the next; 0 for none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int,
        across: dist.ProcessGroup | None,
        levels: LevelGroups | None = None,
        every: int,
        momentum: float,
    ) -> None:
        # By name: the weights of the last average, None if the ranks do not share them; and their movements.
        self._begun: dict[str, Tensor] | None = None
        self._moving: dict[str, Tensor] = {}
        self._since = 1
        super().__init__(model, world_size=1)
        self._replicas, self._across, self._levels, self._every = replicas, across, levels, every
        self._momentum = momentum
        self._since = 0

    def begin_again(self) -> None:
        # Only some ranks may have made the average. So all count from here, and make the next `unite`.
        self._since = 1
        super().begin_again()
        self._begun = None
        self._moving.clear()

    @property
    def apart(self) -> int:
        return self._replicas

    def let_go(self) -> None:
        super().let_go()
        self._begun = None
        self._moving.clear()

    @torch.no_grad()
    def reset(self, *, passes: int = 1) -> None:
        super().reset(passes=passes)
        if not self._since and self._momentum and self._begun is None:
            self._begun = {name: p.detach().clone() for name, p in self._averaged().items()}

    def finish(self) -> Tensor | None:
        canary = super().finish()
        if all(p.grad is None for p in self._params.values()):
            # A rank without rows updates too, so that all optimizers have state for the same parameters.
            for p in self._params.values():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        return canary

    def after_step(self) -> None:
        self._since += 1
        if self._since >= self._every:
            self.unite()

    def unite(self, state: Iterable[Tensor] = ()) -> None:
        if self._since:
            self._average([p.detach() for p in self._averaged().values()])
            self._move_on()
        self._since = 0
        self._average(list(state))

    def _averaged(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._params.items() if p.requires_grad}

    @torch.no_grad()
    def _move_on(self) -> None:
        """Move the weights on from the last average by the momentum of its differences, instead of by the last
        difference."""
        begun, self._begun = self._begun, None  # the next step notes its start, since weights may be set in between
        for name, p in self._averaged().items():
            if begun is None or name not in begun:
                self._moving.pop(name, None)
                continue
            moved = p.detach() - begun[name]
            if name in self._moving:
                moved.add_(self._moving[name], alpha=self._momentum)
            self._moving[name] = moved
            p.copy_(begun[name].add_(moved))

    @torch.no_grad()
    def _average(self, tensors: list[Tensor]) -> None:
        """Average `tensors` over the replicas, in messages of a bucket's size and in the same order on all ranks.

        The optimizer's tensors may be on the host.
        """
        device = next(iter(self._params.values())).device
        while tensors:
            size, group = 0, list[Tensor]()
            while tensors and size < BUCKET and tensors[0].dtype == (group or tensors)[0].dtype:
                group.append(tensors.pop(0))
                size += group[-1].nbytes
            flat = torch.cat([tensor.reshape(-1).to(device) for tensor in group])
            all_reduce(flat, None, self._across, self._levels).wait()
            flat.div_(self._replicas)
            for tensor, mean in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(mean.view_as(tensor))
