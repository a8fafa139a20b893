"""The interface of all data axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nbkit.errors import TrainingError
from nbkit.tensor_layout import Layout

Place = tuple[nn.Module, str]
"""(a module, the name of a parameter in it)"""


class DataAxis:
    """The base class of data axes.

    A step calls `reset`; for every micro-batch but the last: forward, backward, `hold`; then forward, `start`,
    backward, `finish`; the optimizer's step; `after_step`; and `settle`, at the latest before the next `start`.
    Gradients are sums over the ranks, in `.grad` of the `held` parameters.

    held: canonical name -> the parameter that the optimizer gets. layouts: name -> the part of the global tensor that
    it is.
    """

    _takes_memory = False
    """True if a parameter may stay in memory that the user has assigned to it."""

    def __init__(self) -> None:
        self.held: dict[str, nn.Parameter] = {}
        self.layouts: dict[str, Layout] = {}
        self._weights: dict[str, tuple[Tensor, Layout]] = {}
        # The parameters in the module between two steps, by name; their places; the memory that was last found there.
        self._shown: dict[str, nn.Parameter] = {}
        self._places: list[tuple[dict[str, Any], str]] = []
        self._there: list[nn.Parameter] = []
        self._pointers: list[int] = []
        self._leaves: list[nn.Parameter] = []

    @property
    def routed(self) -> Sequence[Mapping[int, int]]:
        """Return, for each layer, {number of an expert on this rank: tokens that it has computed since `reset`}.

        A token counts once for each expert that it chose. Empty if no experts are spread over ranks.
        """
        return ()

    @property
    def expert_times(self) -> Sequence[Sequence[tuple[Any, Any]]]:
        """Return, for each layer, when experts on this rank began and ended their forwards since `reset`.

        The times are stamps of the step clock (telemetry/phases.py).
        """
        return ()

    def _add(
        self,
        name: str,
        held: nn.Parameter | None,
        layout: Layout,
        weight: tuple[Tensor, Layout],
        shown: nn.Parameter,
        places: Sequence[Place],
    ) -> None:
        if held is not None:
            self.held[name], self.layouts[name] = held, layout
        self._weights[name] = weight
        self._shown[name] = shown
        for part, attribute in places:
            self._places.append((vars(part)["_parameters"], attribute))
            self._there.append(shown)

    @property
    def weights(self) -> dict[str, tuple[Tensor, Layout]]:
        """Return name -> (the tensor to fill with a weight, its part of the global tensor). Call `refresh`
        afterwards."""
        self.settle()
        self._pointers = []  # a transposed view begins at the same address as the whole
        self.follow()
        return self._weights

    def follow(self) -> None:
        """Find parameters, or memory of parameters, that the user has replaced. Call it between two steps.

        `p.data = x`, `model.to(...)` and `load_state_dict(assign=True)` replace them. The new values are copied to the
        memory in which the job keeps this parameter. Raises TrainingError for values of another shape, dtype or device,
        and if a parameter is missing.
        """
        if not all(map(is_, [place.get(attribute) for place, attribute in self._places], self._there)):
            self._put_back()
        if [p.data_ptr() for p in self._shown.values()] == self._pointers:
            return
        self.settle()
        for name, shown in self._shown.items():
            known, layout = self._weights[name]
            if not shown.is_set_to(known):
                check_alike(name, shown, known)
                if self._takes_memory:
                    self._weights[name] = shown.data, layout
                else:
                    known.copy_(shown.data)
                    shown.data = known
                increment_version(shown)  # so that TrainingStep sees this change of the user
        self._pointers = [p.data_ptr() for p in self._shown.values()]

    @torch.no_grad()
    def _put_back(self) -> None:
        """Copy the values of parameters that replaced the job's own, and put the job's own parameters back."""
        names = {id(p): name for name, p in self._shown.items()}
        seen: dict[int, nn.Parameter] = {}
        for (place, attribute), own in zip(self._places, self._there, strict=True):
            found = place.get(attribute)
            if found is own:
                continue
            name = names[id(own)]
            if not isinstance(found, nn.Parameter) or id(found) in names or seen.setdefault(id(found), own) is not own:
                raise TrainingError(
                    f"The parameter {name!r} was moved or removed after the job was built.",
                    numbers="gone" if found is None else f"another parameter is there, shape {tuple(found.shape)}",
                    hint="parametrize, prune and tie weights first: nbkit.Trainer(model=lambda: changed(build()), ...)",
                )
            check_alike(name, found, own)
            own.copy_(found)
            place[attribute] = own

    def refresh(self) -> None:
        """Note that the weights were filled from outside."""

    def begin_again(self) -> None:
        """Return to the initial state after an aborted step or `let_go`, and allocate memory. Call it on every rank."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Free the memory of gradients, between two steps or before the first. The next step allocates it again."""
        raise NotImplementedError

    def leaves(self) -> list[nn.Parameter]:
        """Return every parameter to which a user's backward pass may add a gradient."""
        if not self._leaves:
            self._leaves = list({id(p): p for p in (*self._shown.values(), *self.held.values())}.values())
        return self._leaves

    def parts(self) -> list[nn.Parameter]:
        """Return the parameters in the module between two steps of which this rank has only a part."""
        return [p for name, p in self._shown.items() if not self._weights[name][1].is_whole]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that uses memory of the weights."""
        yield from self.held.values()
        yield from (tensor for tensor, _ in self._weights.values())

    def reset(self, *, passes: int = 1) -> None:
        """Begin a step. The previous one may have been aborted at any point.

        passes: number of micro-batches of the rank that has the most. A rank with fewer, or none, makes up for them in
        `finish`. 0: a user calls the model and runs the backward passes, on every rank.
        """
        raise NotImplementedError

    def hold(self) -> None:
        """Keep the gradients after a backward pass that is not the last one."""
        raise NotImplementedError

    def drop(self) -> None:
        """Drop the gradients that were kept. Forwards that wait for their backward pass are not affected."""

    def keep_open(self) -> None:
        """Keep what a backward pass needs until `finish`, because another pass through the same graph follows."""

    @property
    def is_open(self) -> bool:
        """Return True if a user's forwards have left other parameters in the module than between two steps."""
        return False

    def pass_over(self) -> None:
        """End a backward pass that may have passed through this model on its way to another model."""

    @contextmanager
    def calling(self, *, autocast: bool = False) -> Iterator[None]:
        """Return a context for a user's call of the model. autocast: see `computing`."""
        yield

    def start(self) -> None:
        """Prepare for the backward pass that completes the gradients."""
        raise NotImplementedError

    def finish(self) -> Tensor | None:
        """Complete the gradients after this pass. On a rank without rows, it replaces the pass.

        Returns the canary: see Replicas.finish.
        """
        raise NotImplementedError

    @contextmanager
    def computing(self, *, autocast: bool = False) -> Iterator[None]:
        """Return a context for all forwards and backwards of a step, including losses, or for those of an evaluation.

        autocast: whether forwards run under the job's autocast, equal on every rank.
        """
        yield

    def absent(self, *, backward: bool = False) -> None:
        """Take part in the all-gathers for a forward (and backward) that this rank does not make."""

    def after_step(self) -> None:
        """Share the update after the optimizer's step. Updates of other ranks may arrive later: see `settle`."""

    def settle(self) -> None:
        """Return when the weights are complete.

        Until then modules contain whole weights, and wait for them when they are read. Code that accesses them in
        another way must call this first.
        """

    def break_off(self, *, broken: bool) -> bool:
        """Drop all running operations after an aborted step. Return True if the weights are complete, as far as this
        axis knows.

        broken: True if the groups no longer work. Takes a few seconds if a rank does not answer.
        """
        return True

    @property
    def apart(self) -> int:
        """Return the number of replicas that make independent steps: 1 if gradients are summed."""
        return 1

    def unite(self, state: Iterable[Tensor] = ()) -> None:
        """Give independent replicas equal weights, and an equal optimizer `state`. All ranks must call it."""

    def close(self) -> None:
        """Remove the hooks from the module, which now serves another strategy or none."""


def check_alike(name: str, found: Tensor, known: Tensor) -> None:
    """Raise TrainingError if the user has replaced the parameter `name` by one that cannot be used."""
    kinds = [(tuple(t.shape), str(t.dtype).removeprefix("torch."), str(t.device)) for t in (known, found)]
    if kinds[0] != kinds[1]:
        raise TrainingError(
            f"The parameter {name!r} was replaced after the job was built.",
            numbers=" -> ".join(" ".join(map(str, kind)) for kind in kinds),
            hint="build the Trainer (or job) again around the changed model; precision='bf16' computes in fewer bits",
        )
