"""The engine of a strategy on this rank: its module, its part of the parameters, and the steps that compute gradients.

A switch builds a second sharded model next to the first, fills it, and then frees the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.data.batch import call
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.grad_norm import grad_norm
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, overrides_train
from nbkit.rank.parallel.pipeline.executor import Forward, OnOp, Pipeline
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.proof.unchanged import plain_attention
from nbkit.rank.parallel.reshard.plain_attributes import Attributes, plain_attributes
from nbkit.rank.parallel.whole_tensors import WholeTensors
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass
class ShardedModel:
    """The model of one plan on this rank.

    partial: parameter names -> the axes over which their gradients are partial sums. notes: information for the user
    about how the model was split. owned: the tensors that the optimizer updates whole, each on its owner; None if there
    are none. no_cache: why the model keeps no keys and values while it generates; "" if it keeps them, None if this was
    not tried. inside: True while nbkit, not the user, calls the module. strategy: the strategy of the plan. axes: the
    groups, degrees and positions of this rank. built: the plain attributes of the module's parts after they were built.
    """

    plan: ParallelPlan
    connections: Connections
    module: nn.Module
    data: DataAxis
    staged: Staged | None = None
    pipeline: Pipeline | None = None
    partial: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    owned: WholeTensors | None = None
    no_cache: str | None = None
    inside: bool = field(default=False, init=False)
    strategy: Strategy = field(init=False)
    axes: Axes = field(init=False)
    built: Attributes = field(init=False)
    _attributes: list[dict[str, Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.strategy, self.axes = self.plan.strategy, self.connections.axes
        self.built = plain_attributes(self.module)
        # Handles of the user may later replace these modules, and at the end show the modules of another strategy.
        self._attributes = [vars(part) for part in self.module.modules()]

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """Return the tensors that the optimizer updates, by original name."""
        return self.data.held if self.owned is None else self.owned.held

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Return the part of the global tensor that each of the `held` tensors is."""
        return self.data.layouts if self.owned is None else self.owned.layouts

    @property
    def gives_output(self) -> bool:
        """Return True if this rank computes the model's output, because it holds the last stage."""
        return self.pipeline is None or self.axes.index("pp") == self.pipeline.schedule.rank_of(self.last_stage)

    @property
    def counts(self) -> bool:
        """Return True if this rank's loss counts. Only one of the ranks that compute the same output counts."""
        return self.gives_output and self.axes.index("tp") == 0 and self.axes.index("cp") == 0

    def runs(self, name: str) -> bool:
        """Return True if the module with the parameter or buffer `name` runs on this rank."""
        return self.staged is None or self.staged.runs(name)

    @property
    def last_stage(self) -> int:
        """Return the number of the stage that computes the output."""
        return 0 if self.pipeline is None else self.pipeline.schedule.num_stages - 1

    @property
    def sums_numbers(self) -> bool:
        """Return True if the messages at the end of a step, in which all ranks meet, can also sum a few numbers."""
        return self.pipeline is not None and self.pipeline.sums_over(self.strategy.mesh.size)

    def stage(self, stage: int, value: Any, received: tuple[Tensor, ...]) -> Any:
        """Run the forward pass of one stage. Return the input of the next stage, or the model's output."""
        if self.staged is None:
            before, self.inside = self.inside, True
            try:
                return call(self.module, value)
            finally:
                self.inside = before
        return self.staged.forward(self._range_of(stage), value, received)

    def idle(self) -> bool:
        """Return True if a module called now belongs to another rank, so that only the shape of its output is used."""
        return self.staged is not None and self.staged.idle()

    def _range_of(self, stage: int) -> int:
        assert self.pipeline is not None
        own: list[int] = list(self.pipeline.schedule.stages_of(self.axes.index("pp")))
        return own.index(stage)

    def backward(
        self,
        micros: int,
        forward: Forward,
        *,
        key: Callable[[int], Hashable],
        launch: Callable[[], None],
        on_op: OnOp | None = None,
        autocast: bool = False,
        numbers: Tensor | None = None,
    ) -> Tensor | None:
        """Run all forward and backward passes of a step. Gradients are stored in `.grad` of `held`, as sums over all
        rows.

        forward: called with a stage, a micro-batch and received tensors; on the last stage it returns (loss,). key:
        returns different values for micro-batches of different shapes. launch: called once, when the last loss is known
        and, if possible, while a backward pass is left to hide it. on_op: see Pipeline.run. autocast: whether `forward`
        runs under autocast. numbers: float64 tensor into which `launch` writes; it is summed over all ranks before the
        return, if `sums_numbers`. Return the canary of the data axis. In a pipeline on CPU ranks, no rank returns
        before all ranks have their gradients.
        """
        if self.owned is not None:
            self.owned.look()
        with self.data.computing(autocast=autocast):
            if self.pipeline is not None and micros:
                count = 0 if numbers is None else numbers.numel()
                self.pipeline.run(micros, forward, key, launch=launch, on_op=on_op, numbers=count)
                self.data.hold()
                self.data.start()
            elif micros:
                for micro in range(micros - 1):
                    forward(0, micro, ())[0].backward()
                    self.data.hold()
                (loss,) = forward(0, micros - 1, ())
                launch()
                self.data.start()
                loss.backward()
            else:
                launch()
                self.data.start()
            canary = self.data.finish()
        self._sum_the_rest()
        if self.pipeline is not None and micros:
            self.pipeline.meet(numbers)
        return canary

    def sum_up(self, *, started: bool) -> Tensor | None:
        """Sum the gradients of the backward passes of the user's losses. `data.hold()` was called after each pass.

        started: True if `data.start()` was called before the last pass. Return the canary of the data axis.
        """
        if not started:
            self.data.start()
        canary = self.data.finish()
        self._sum_the_rest()
        return canary

    def _sum_the_rest(self) -> None:
        """Sum over the other axes, and give gradients to the owners of whole tensors."""
        self._sum_partial()
        if self.owned is not None:
            self.owned.take()

    def after_step(self) -> None:
        """Share the update after the optimizer's step: whole tensors first, then those of the data axis."""
        if self.owned is not None:
            self.owned.give_back()
        self.data.after_step()

    def outputs(self, micros: int, forward: Forward, *, key: Callable[[int], Hashable]) -> list[Any]:
        """Return the output of `forward` per micro-batch on the last stage, without gradients; [] on other ranks."""
        if self.pipeline is None:
            return [forward(0, micro, ())[0] for micro in range(micros)]
        return [output[0] for output in self.pipeline.run(micros, forward, key, training=False)]

    def rounds(self, count: int, sequences: int, forward: Forward, *, key: Callable[[int], Hashable]) -> None:
        """Run `count` forward passes of each of `sequences`. A sequence begins its next pass after it left the last
        stage.

        forward: called with a stage, a number, which is round * sequences + sequence, and received tensors.
        """
        if self.pipeline is not None:
            self.pipeline.run(count * sequences, forward, key, training=False, rounds=count)
            return
        for number in range(count * sequences):
            forward(0, number, ())

    def begin_again(self) -> None:
        """Return to the initial state after an aborted step. Call it on every rank."""
        self.data.begin_again()
        if self.owned is not None:
            self.owned.begin_again()
        if self.pipeline is not None:
            self.pipeline.begin_again()

    def close(self) -> None:
        """Remove hooks and wrappers from the module, for another strategy. The last reference frees the memory."""
        self.data.close()
        if self.staged is not None:
            self.staged.close()
        for attributes in self._attributes:  # a module and the wrapper of its forward refer to each other
            if isinstance(attributes.get("forward"), Wrapper):
                del attributes["forward"]

    def _sum_partial(self) -> None:
        by_axis: dict[str, list[str]] = {}
        for name, axes in self.partial.items():
            for axis in axes:
                by_axis.setdefault(axis, []).append(name)
        for axis, names in sorted(by_axis.items()):
            if (group := self.axes.group(axis)) is not None:
                # The order of a set differs between interpreters.
                self._sum(sorted(names), partial(dist.all_reduce, group=group))
        for tied in self.connections.ties:
            self._sum(tied.names, tied.sum)

    @torch.no_grad()
    def _sum(self, names: Sequence[str], reduce: Callable[[Tensor], Any]) -> None:
        """Sum the gradients of `names` in one call of `reduce`, which sums a tensor over the ranks that hold them.

        A gradient that no rank has stays None: an optimizer such as Adam would move a weight whose gradient is zero.
        """
        # All ranks of a group hold the same tensors. A tensor with an owner elsewhere on the data axis is on none of
        # them.
        held = [p for name in names if (p := self.data.held.get(name)) is not None]
        params = [p for p in held if p.requires_grad and p.numel()]
        for dtype in dict.fromkeys(p.dtype for p in params):
            own = [p for p in params if p.dtype == dtype]
            there = [p.grad is not None for p in own]
            grads = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own]
            counted = grads[0].new_ones(len(own))  # made on the device, so nothing is copied from the host
            for number, is_there in enumerate(there):
                if not is_there:
                    counted[number].zero_()
            flat = torch.cat([*grads, counted])
            reduce(flat)
            *sums, counts = flat.split([*(p.numel() for p in own), len(own)])
            # A rank that has all gradients need not read the counts, which would wait for the device.
            anywhere = there if all(there) else [count > 0 for count in counts.tolist()]
            for p, summed, some in zip(own, sums, anywhere, strict=True):
                if some:
                    p.grad = torch.empty_like(p) if p.grad is None else p.grad
                    p.grad.copy_(summed.view_as(p))

    @property
    def holds_all_gradients(self) -> bool:
        """Return True if every rank has all gradients of the whole model after `backward`."""
        alone = self.strategy.mesh.size == 1
        return alone or (
            self.strategy.mesh.size == self.strategy.dp
            and not self.strategy.zero
            and self.strategy.ep == 1
            and self.data.apart == 1
        )

    def grad_norm(self, device: torch.device) -> Tensor:
        """Return the 2-norm of the gradients of the whole model: float64, on `device`. All ranks must call it."""
        # If every rank holds every gradient, nothing is sent. If replicas train independently, the norm is the root of
        # the mean square of their norms.
        size = 1 if self.holds_all_gradients else self.strategy.mesh.size
        copies: Mapping[str, int] = {} if size == 1 else self.connections.replication
        return grad_norm(self.held, copies, device=device, group=self.connections.world, world_size=size)

    @contextmanager
    def evaluating(self, *, autocast: bool = False) -> Iterator[None]:
        """Set the module to eval mode, without gradients. autocast: whether forwards run under the job's autocast."""
        self.data.settle()
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            # For padded positions, torch's fast path for encoders gives other numbers than the layers that train.
            with torch.no_grad(), plain_attention(), self.data.computing(autocast=autocast):
                yield
        finally:
            if overrides_train(self.module):
                # The model's own `eval()` may have done more than set modes, such as merging adapters.
                self.module.train(modes[0][1])
            for module, mode in modes:
                module.training = mode
