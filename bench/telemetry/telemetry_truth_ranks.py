"""A rank that trains with a delay somewhere, and writes records of it. Run by bench.rigs.forked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import nbkit
from bench.pipeline.sleeping_rank import Along, Beside, until
from bench.rigs.jobs import config, data, token_loss
from nbkit.rank.comm.delegating_group import COLLECTIVES, DelegatingGroup, live
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import World
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy

_LATE = ("allreduce", "_allgather_base", "allgather", "alltoall_base")

ANYONE, NOBODY = -1, -2

BLOCKS = 2
"""Of the model that sleeps: one for each stage of a pipeline."""


class Worker:
    """One job after the other. Its delay is taken in the steps after `slow` is called with one."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        World.join_from_env()
        self._config, self._batch = config(width, layers, block=block), batch
        self._delay = dict.fromkeys(("data", "compute", "link"), 0.0)
        self._undo: list[Callable[[], None]] = []
        self._taken: set[str] = set()
        self._busy_until = 0.0  # of what computes, in seconds of perf_counter

    def prepare(self, strategy: str, *, compute: float = 0.0, unit: float = 0.0) -> str:
        """Train `strategy` from here on; returns the directory of the run.

        compute: a model whose compute is so many seconds of sleep in each rank's step, a third of them forward, and
        next to nothing else; 0: a GPT, which computes. unit: a model of stages that sleep, so many seconds each.
        """
        self._heal()
        chosen = Strategy.parse(strategy, dist.get_world_size())
        self._per_row = compute / 3 / (self._batch / chosen.dp) / (BLOCKS / chosen.pp)
        stages = Schedule.of(chosen.schedule or "1f1b", chosen.pp, 1).num_stages if unit else 0
        self._trainer = Trainer(
            model=(lambda: Sleepers(stages, unit)) if unit else lambda: self._model(compute),
            loss=(lambda output, target: output.mean()) if unit else token_loss,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
            data=[(torch.zeros(1), torch.zeros(1))] * 64 if unit else data(self._config, 8 * self._batch),
            batch_size=self._batch,
            strategy=strategy,
            loading=nbkit.Loading(collate=self._collate),
            progress=False,
        )
        session = self._trainer.job.recorder._session
        assert session is not None
        session._detail_every = 1  # the moments of every step
        return str(self._trainer.run_dir)

    def train(
        self, steps: int, *, where: str = "", seconds: float = 0.0, ranks: tuple[int, ...] = ()
    ) -> tuple[int, int]:
        """(first, last) step of so many, with a delay of so many seconds in each on these ranks.

        where: "data", "compute", or the axis of the group of `ranks` whose next transfer of a step arrives that much
        later: a collective's on all of them, a message's on the last one, from the first one.
        """
        first = self._trainer.step + 1
        self._heal()
        slow = ""
        if dist.get_rank() in ranks:
            self._delay[where if where in self._delay else "link"] = seconds
            slow = "" if where in self._delay else where
        self._wrap(slow, ranks)
        self._trainer.fit(steps)
        return first, self._trainer.step

    def _model(self, compute: float) -> nn.Module:
        # Lambdas: a model is copied with what its hooks are bound to.
        model: Any = Small(self._config, lambda *args: self._compute(*args)) if compute else nbkit.GPT(self._config)
        for each in model.blocks:
            each.register_forward_pre_hook(lambda module, args: self._sleep("compute"))
        return model  # type: ignore[no-any-return]

    def _compute(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """The compute of a block on these rows, in which it sleeps: here, and twice as long before its backward."""
        seconds = self._per_row * len(output)
        self._take(seconds)
        if output.requires_grad:
            output.register_hook(lambda grad: self._take(2 * seconds))

    def _take(self, seconds: float) -> None:
        """So much more is computed, from where it was done with what came before.

        What the host does meanwhile is hidden behind it, as with a device: how long that takes hangs on who else is at
        the cores, which is nothing that a delay has to do with.
        """
        done = self._busy_until + seconds
        self._busy_until = max(done, time.perf_counter())
        until(done)

    def _ready(self) -> None:
        """There was nothing to compute until now."""
        self._busy_until = time.perf_counter()

    def _collate(self, samples: list[Any]) -> Any:
        self._taken.clear()  # a step begins
        self._sleep("data")
        batch = default_collate(samples)
        self._ready()
        return batch

    def _sleep(self, where: str) -> None:
        """Once a step."""
        if self._delay[where] and where not in self._taken:
            self._taken.add(where)
            if where != "compute" or not self._per_row:
                self._ready()
            self._take(self._delay[where])

    def _wrap(self, axis: str, ranks: tuple[int, ...]) -> None:
        """Whatever comes over a group is waited for through us; over the one of `ranks` on `axis` it comes late."""
        for group in live():
            slow = bool(axis) and group.seen.axis == axis and set(ranks) <= set(group.members)
            inner = group.inner
            group.inner = _Link(inner, self._arrived, self._source(axis, group, ranks) if slow else None)
            self._undo.append(lambda group=group, inner=inner: setattr(group, "inner", inner))  # type: ignore[misc]

    def _arrived(self, late: bool) -> None:
        if late:
            self._sleep("link")
        self._ready()

    def _source(self, axis: str, group: DelegatingGroup, ranks: tuple[int, ...]) -> int:
        """Whose messages come late here; ANYONE: collectives do; NOBODY."""
        if axis != "pp":
            return ANYONE
        return group.members.index(ranks[0]) if dist.get_rank() == ranks[-1] else NOBODY

    def _heal(self) -> None:
        while self._undo:
            self._undo.pop()()
        for where in self._delay:
            self._delay[where] = 0.0


class Small(nn.Module):
    """Blocks of an MLP of a few numbers each: whatever `compute` adds is what it computes.

    compute: a forward hook of each block's wider half, where every rank of a tensor axis holds all positions.
    """

    def __init__(self, of: nbkit.GPTConfig, compute: Callable[..., None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(of.vocab, of.width)
        self.blocks = nn.ModuleList(MLP(of.width) for _ in range(BLOCKS))
        self.head = nn.Linear(of.width, of.vocab)
        for each in self.blocks:
            each.get_submodule("up").register_forward_hook(compute)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.relu(self.up(x)))
        return y


class Sleepers(nn.Module):
    """A stage's worth each: forward, the gradient of the input and that of the weight sleep `unit` seconds."""

    def __init__(self, stages: int, unit: float) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.zeros(1))  # so that the first stage's input has a gradient too
        self.blocks = nn.ModuleList(Sleeper(unit) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.begin
        for block in self.blocks:
            x = block(x)
        return x


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Along.apply(x, self.seconds) + Beside.apply(self.weight, self.seconds)
        return y


class _Link:
    """An inner group that tells `arrived` when something has come, and whether it comes late: what is from `source`."""

    def __init__(self, inner: Any, arrived: Callable[[bool], None], source: int | None) -> None:
        self._inner, self._arrived, self._source = inner, arrived, source

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._inner, name)
        if name in COLLECTIVES:
            late = self._source == ANYONE and name in _LATE
            return lambda *args: _Watched(own(*args), self._arrived, late)
        if name == "recv":
            return lambda tensors, peer, tag: _Watched(own(tensors, peer, tag), self._arrived, peer == self._source)
        return own


class _Watched(dist.Work):
    def __init__(self, inner: Any, arrived: Callable[[bool], None], late: bool) -> None:
        super().__init__()
        self._inner, self._arrived, self._late = inner, arrived, late

    def wait(self, *timeout: Any) -> Any:
        done = self._inner.wait(*timeout)
        self._arrived(self._late)
        return done

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def get_future(self) -> Any:
        return self._inner.get_future()
