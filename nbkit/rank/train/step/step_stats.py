"""Sum the results of a step over the ranks, and bring them from the device into the record.

`StepReduction` is the small reduction of every step: loss, weight, requests, ranks with values that are not finite,
seconds. It is one all-reduce of a few float64 numbers. It is launched before the backward pass of the last micro-batch,
so that it overlaps with it. In a pipeline on CPU ranks it is launched as soon as no other rank waits for this one. In a
pipeline on GPUs, and while a backup is being sent (see replace/backup.py), it is launched after the last operation. If
all ranks are in one pipeline, the messages at the end of a step, by which its stages meet, carry the numbers. On GPUs
the result is read one step later, so that the host does not wait for the device. CPU ranks wait for it before their
update. It is launched early, so it has mostly arrived by then.

A `DeviceScalar` is copied from the device to the host. Reading it waits for its own copy, but not for later work of the
device. A `Pending` is a step whose results have not been read yet.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.mesh import Mesh
from nbkit.rank.comm.group_creation import breaking_off
from nbkit.rank.data.batch import Parts
from nbkit.rank.device import Event, accelerator
from nbkit.rank.parallel.data_parallel.ddp import ALIVE
from nbkit.rank.train.control.step_boundary import READY
from nbkit.records.event_words import recorded


class DeviceScalar:
    """A tensor being copied to the host; on the CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: Event | None = None
        if accelerator().holds(tensor):
            self._host, self._copied = accelerator().fetch(tensor)

    def arrived(self) -> bool:
        """Return True if the tensor is on the host already. From any thread."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> Tensor:
        """Return the tensor on the host. Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def to_host_async(number: float | Tensor) -> float | DeviceScalar:
    """Return the present value of `number`, which may be overwritten later. Does not wait for a GPU."""
    if isinstance(number, Tensor) and accelerator().holds(number):
        return DeviceScalar(number.detach())
    return float(number)


def ready(number: float | DeviceScalar) -> float:
    """Return the number. Waits for the copy."""
    return float(number.read()) if isinstance(number, DeviceScalar) else number


_LOSS, _WEIGHT, _WEIGHTED, _HELD, _READY, _TOKENS, _CANARY, _SHARED = range(8)
# Per rank; the last one also per layer.
_SECONDS, _FLAGS, _FINGERPRINT, _BACKUP, _PEAK, _SENT, _TARGETS, _RATES, _WEIGHTS, _ROUTED = range(10)
NO_RATE = -1e300  # stands for a learning rate that is NaN or infinite
_NOT_FINITE, _ENDS, _DATA_ENDS, _REFUSES, _COMPARES, _EDITED = 1, 2, 4, 8, 16, 32  # flags of a rank


@dataclass(frozen=True)
class StepNumbers:
    """The results of a step, equal on all ranks.

    loss: the loss of the whole global batch. weighted: the loss function returned (sum, weight). held: the number of
    ranks that hold the next request and have prepared their own part of it. ready: the number of these ranks that are
    completely prepared. not_finite: ranks whose own loss or weight was NaN or infinite. ends: a rank was told to end
    the training. seconds, fingerprints: one value per rank. whole: the gradients are summed over all ranks; False if
    the reduction was aborted. backup: seconds of a backup on the slowest rank. data_ends: see Shard.ends; True if it is
    for any rank. counted: (peak bytes, sent bytes) of the ranks with most; 0 if not measured yet. refused: ranks that
    have found the loss to be no mean over rows. compared: ranks whose loss compares rows. edited: ranks on which
    the user has changed gradients before their sum. targets, rates, weights, routed: see `StepReduction.launch`; one
    entry per rank.
    """

    loss: float
    weight: float
    weighted: bool
    held: int
    ready: int
    tokens: int
    seconds: list[float]
    not_finite: list[int]
    fingerprints: list[int]
    whole: bool = True
    backup: float = 0.0
    ends: bool = False
    data_ends: bool = False
    counted: tuple[int, int] = (0, 0)
    refused: list[int] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    edited: list[int] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    routed: list[list[int]] = field(default_factory=list)


_on_devices: deque[weakref.ref[StepReduction]] = deque(maxlen=4)
"""The newest reductions that the host does not wait for. There are never more at a time."""


class StepReduction:
    """Sums the results of one step over the ranks. Only `read` waits for them.

    layers: the number of layers whose experts are spread over ranks.
    """

    def __init__(self, *, rank: int, world_size: int, device: torch.device, layers: int = 0) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._each = _ROUTED + layers
        self._work: dist.Work | None = None
        self._carried: Tensor | None = None
        self._underway: DeviceScalar | None = None
        self._broken_off = False
        self._numbers: StepNumbers | None = None

    def carried(self) -> Tensor:
        """Return memory for the numbers. The caller sums them over the ranks, between `launch` and `finish`."""
        self._carried = torch.zeros(_SHARED + self._each * self.world_size, dtype=torch.float64)
        return self._carried

    def launch(
        self,
        loss_sum: Tensor,
        weight: Tensor | float,
        *,
        weighted: bool,
        stage: int,
        tokens: int,
        seconds: float,
        fingerprint: int,
        backup: float = 0.0,
        ends: bool = False,
        data_ends: bool = False,
        counted: tuple[int, int] = (0, 0),
        refuses: bool = False,
        compares: bool = False,
        edited: bool = False,
        targets: float = 0.0,
        rates: float = 0.0,
        weights: Tensor | None = None,
        routed: Sequence[int] = (),
    ) -> None:
        """Start the all-reduce.

        loss_sum: this rank's summed loss, on the device. weight: its divisor. stage: the state of the next request (see
        step_boundary.Inbox). backup: seconds of the last backup (see Backups). ends: this rank was told to end the
        training. data_ends: see Shard.ends. counted: this rank's peak and sent bytes, see Counts. refuses: this rank
        has found the loss to be no mean over rows. compares: its loss compares rows. edited: the user has changed
        gradients before their sum. targets: the targets of this rank's cross entropies, for each row. rates: the sum of
        the learning rates. weights: the norm of the weights; None if it is not compared now. routed: for each layer,
        the tokens that this rank's experts have computed in this step. The rank has made its own forward passes of the
        step by then.

        Ranks that work on the same rows (tensor or pipeline parallel) count once: all but one of them pass zeros.
        """
        slots = [0.0] * (_SHARED + self._each * self.world_size)
        slots[_WEIGHTED], slots[_TOKENS] = weighted, tokens
        slots[_HELD], slots[_READY] = stage > 0, stage == READY
        at = _SHARED + self._each * self.rank
        rates = rates if math.isfinite(rates) else NO_RATE  # otherwise the reduction would count as interrupted
        slots[at : at + _ROUTED + len(routed)] = seconds, 0, fingerprint, backup, *counted, targets, rates, 0, *routed
        told = _ENDS * ends + _DATA_ENDS * data_ends + _REFUSES * refuses + _COMPARES * compares + _EDITED * edited
        if accelerator().holds(self.device):
            if not isinstance(weight, Tensor):
                slots[_WEIGHT] = weight
            vector = accelerator().send(torch.tensor(slots, dtype=torch.float64), self.device)
            vector[_LOSS] = loss_sum
            if weights is not None:
                vector[at + _WEIGHTS] = weights
            if isinstance(weight, Tensor):
                vector[_WEIGHT] = weight
            vector[at + _FLAGS] = _NOT_FINITE * ~torch.isfinite(vector[_LOSS] + vector[_WEIGHT]) + told
            _on_devices.append(weakref.ref(self))
        else:
            # The numbers are on the host: plain arithmetic is faster than a dozen operations on tensors.
            slots[_LOSS], slots[_WEIGHT] = loss, weight = float(loss_sum), float(weight)
            slots[at + _WEIGHTS] = 0.0 if weights is None else float(weights)
            slots[at + _FLAGS] = _NOT_FINITE * (not math.isfinite(loss + weight)) + told
            vector = torch.tensor(slots, dtype=torch.float64)
        self._vector = vector if self._carried is None else self._carried.copy_(vector)
        if self.world_size > 1 and self._carried is None:
            self._work = dist.all_reduce(vector, async_op=True)

    def finish(self, canary: Tensor | None) -> None:
        """Make later work of the device wait for the reduction, and start the copy to the host.

        canary: an element of the gradients' reduction (see Replicas.finish); None if no gradient was reduced.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if canary is None:
            # Not an assignment, which would send the number from the host and wait for it.
            self._vector[_CANARY].fill_(ALIVE)
        else:
            self._vector[_CANARY] = canary
        self._underway = DeviceScalar(self._vector)

    def break_off(self) -> None:
        """Note that the reduction was aborted, unless its result has arrived.

        Then no rank has complete gradients. The canary does not show this: it is only one element, and others may use
        another channel.
        """
        if self._numbers is None and (self._underway is None or not self._underway.arrived()):
            self._broken_off = True

    def per_weight(self, divided_by: float = 1.0) -> Tensor:
        """Return `divided_by` / the weight of all ranks, on the device; 0 if the weight is 0.

        Call it after `finish`.
        """
        weight = self._vector[_WEIGHT]
        return torch.where(weight > 0, divided_by / weight, 0.0)

    @property
    def loss(self) -> Tensor:
        """Return the loss of all ranks, on the device, 0-dimensional.

        Raises TrainingError before `finish`, if the user sums the gradients later.
        """
        if self._underway is None:
            raise TrainingError(
                "The loss of all ranks is not known yet: it is summed with the gradients.",
                hint="job.optimizer.step(), or job.clip(1.0), and then result.loss; or job.mean(loss) at once",
            )
        return self._vector[_LOSS] * self.per_weight()

    def read(self) -> StepNumbers:
        """Return the results on the host. Waits for the copy."""
        # CPU ranks read twice: before the update, to check the loss, and a step later, for the record.
        if self._numbers is None:
            self._numbers = self._read()
        return self._numbers

    def _read(self) -> StepNumbers:
        assert self._underway is not None
        values = self._underway.read().tolist()
        if self._broken_off or values[_CANARY] != ALIVE or not all(map(math.isfinite, values[_WEIGHTED:])):
            # The reduction was aborted on a device, where no call raises. The values are arbitrary.
            none = [0] * self.world_size
            return StepNumbers(math.nan, 0.0, False, 0, 0, 0, [0.0 for _ in none], [], none, whole=False)
        ranks = [values[_SHARED + column :: self._each] for column in range(self._each)]
        weight = values[_WEIGHT]
        return StepNumbers(
            loss=values[_LOSS] / weight if weight > 0 else 0.0,
            weight=weight,
            weighted=values[_WEIGHTED] > 0,
            held=round(values[_HELD]),
            ready=round(values[_READY]),
            tokens=round(values[_TOKENS]),
            seconds=ranks[_SECONDS],
            not_finite=[rank for rank, flags in enumerate(ranks[_FLAGS]) if round(flags) & _NOT_FINITE],
            fingerprints=[round(value) for value in ranks[_FINGERPRINT]],
            backup=max(ranks[_BACKUP]),
            counted=(round(max(ranks[_PEAK])), round(max(ranks[_SENT]))),
            refused=[rank for rank, flags in enumerate(ranks[_FLAGS]) if round(flags) & _REFUSES],
            compared=[rank for rank, flags in enumerate(ranks[_FLAGS]) if round(flags) & _COMPARES],
            edited=[rank for rank, flags in enumerate(ranks[_FLAGS]) if round(flags) & _EDITED],
            targets=ranks[_TARGETS],
            rates=ranks[_RATES],
            weights=ranks[_WEIGHTS],
            routed=[list(map(round, layers)) for layers in zip(*ranks[_ROUTED:], strict=True)],
            ends=any(round(flags) & _ENDS for flags in ranks[_FLAGS]),
            data_ends=any(round(flags) & _DATA_ENDS for flags in ranks[_FLAGS]),
        )


@dataclass(frozen=True)
class StepResult:
    """The result of `job.backward`."""

    _reduction: StepReduction

    @property
    def loss(self) -> Tensor:
        """Return the loss of the whole global batch, as a 0-dimensional tensor on the device. Does not wait for it."""
        return self._reduction.loss  # computed on request: four operations that a Trainer does not need


def _break_off() -> None:
    for one in list(_on_devices):
        if (reduction := one()) is not None:
            reduction.break_off()


breaking_off.append(_break_off)


def _imbalance(routed: Sequence[Sequence[int]], mesh: Mesh, ep: int) -> float:
    """Return the tokens that the slowest rank of each layer computed, summed over the layers, over those of the mean.

    In every layer, the ranks that share experts wait for the one that was sent most. So the layers add up: a layer in
    which one rank is the slowest does not make up for a layer in which another rank is. The worst stage of a pipeline
    counts, and in it the worst group. routed: the tokens of each layer, by rank. ep: the ranks that share experts.
    """
    stages: dict[int, list[tuple[int, float]]] = {}
    for group in mesh.shard_groups(ep)[0]:
        layers = list(zip(*(routed[rank] for rank in group), strict=True))
        most, mean = sum(map(max, layers)), sum(map(sum, layers)) / len(group)
        stages.setdefault(mesh.index(group[0])["pp"], []).append((most, mean))
    worst = (
        max(most for most, _ in each) * len(each) / max(sum(mean for _, mean in each), 1e-9) for each in stages.values()
    )
    return max(worst)


_OWN = ("step", "lr", "strategy", "seconds", "samples", "tokens")


@dataclass
class Pending:
    """A step whose results have not been read yet.

    mesh, strategy: the ones in force in this step. parts: see Shard. asked: the number of the request that its
    reduction asked about. made: the optimizer has made the step. remarks: words for the record. losses: the number of
    the user's losses; 0 if `backward` got a batch. ep: the number of ranks that share experts.
    """

    step: int
    reduction: StepReduction
    asked: int
    samples: int
    indices: Sequence[int]
    lr: float | DeviceScalar
    mesh: Mesh
    strategy: str
    parts: Parts = None
    losses: int = 0
    ep: int = 1
    extra: dict[str, float | DeviceScalar] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    made: bool = False

    def add(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Add numbers to the record.

        Raises TrainingError for names that the record has already, and for values that are not single numbers.
        """
        if taken := [name for name in _OWN if name in numbers]:
            raise TrainingError(
                "log() got a name that the record uses itself.",
                numbers=f"{', '.join(taken)}, of {', '.join(_OWN)}",
                hint=f"job.log(my_{taken[0]}=...)",
            )
        for name, value in numbers.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise TrainingError(
                    "log() takes one number for each name.",
                    numbers=f"{name}: shape {tuple(value.shape)}",
                    hint=f"{name}.mean()",
                )
            try:
                self.extra[name] = to_host_async(value)
            except (TypeError, ValueError):
                raise TrainingError("log() takes numbers.", numbers=f"{name}: {value!r}") from None

    def record(self, numbers: StepNumbers) -> dict[str, Any]:
        """Return the entry of `history`. Its seconds are the slowest rank's, from the previous loss to this one.

        imbalance: see `_imbalance`, where experts are spread over ranks.
        """
        return {
            "step": self.step,
            "loss": numbers.loss,
            "lr": ready(self.lr),
            "strategy": recorded(self.strategy),
            "seconds": round(max(numbers.seconds), 7),  # as in the files, so that all views show the same digits
            "samples": self.samples,
            "tokens": numbers.tokens,
            **({"imbalance": _imbalance(numbers.routed, self.mesh, self.ep)} if any(map(any, numbers.routed)) else {}),
            **{name: ready(value) for name, value in self.extra.items()},
            **self.remarks,
        }
