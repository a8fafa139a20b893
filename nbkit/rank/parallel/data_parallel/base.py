"""The interface of every data axis, whatever it shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from nbkit.tensor_layout import Layout


class DataAxis:
    """A step: `reset`; for every micro-batch but the last forward, backward, `hold`; forward, `start`, backward,
    `finish`; the optimizer's step; `after_step`; `settle`, at the latest before the next `start`. Gradients are sums
    over the ranks, in `.grad` of what is `held`.

    held: canonical name -> the parameter that the optimizer gets. layouts: name -> what it is of the global tensor.
    """

    def __init__(self) -> None:
        self.held: dict[str, nn.Parameter] = {}
        self.layouts: dict[str, Layout] = {}
        self._weights: dict[str, tuple[Tensor, Layout]] = {}

    def _add(self, name: str, held: nn.Parameter, layout: Layout, weight: tuple[Tensor, Layout]) -> None:
        self.held[name], self.layouts[name], self._weights[name] = held, layout, weight

    @property
    def weights(self) -> dict[str, tuple[Tensor, Layout]]:
        """name -> (the tensor to be filled with a weight, what it is of the global one); `refresh` after filling."""
        self.settle()
        return self._weights

    def refresh(self) -> None:
        """The weights were filled from outside."""

    def begin_again(self) -> None:
        """As at the beginning, on every rank alike, after a step that was broken off somewhere, or `let_go`."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Give up the memory of gradients, between two steps; no step before `begin_again`."""
        raise NotImplementedError

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that shows memory of the weights."""
        yield from self.held.values()
        yield from (tensor for tensor, _ in self._weights.values())

    def reset(self, *, passes: int = 1) -> None:
        """A step begins; the one before may have been broken off anywhere.

        passes: micro-batches of the rank that has most. One that has fewer, or none, makes up for them in `finish`.
        """
        raise NotImplementedError

    def hold(self) -> None:
        """After a backward pass that another follows."""
        raise NotImplementedError

    def start(self) -> None:
        """Before the backward pass that completes the gradients."""
        raise NotImplementedError

    def finish(self) -> Tensor | None:
        """After that pass; on a rank without rows, instead of it. Returns the canary: see Replicas.finish."""
        raise NotImplementedError

    @contextmanager
    def computing(self, *, autocast: bool = False) -> Iterator[None]:
        """Around all forwards and backwards of a step, losses included, or around those of an evaluation.

        autocast: whether forwards are under the job's autocast, on every rank alike.
        """
        yield

    def absent(self, *, backward: bool = False) -> None:
        """This rank makes no forward (and no backward) where the others make one: it takes part in what they gather."""

    def after_step(self) -> None:
        """The optimizer has updated what is held. What other ranks updated may still be on its way: see `settle`."""

    def settle(self) -> None:
        """Return when the weights are whole. Until then modules show them whole, and wait for it where they are read;
        who reads or writes them otherwise settles first."""

    def break_off(self, *, broken: bool) -> bool:
        """A step was broken off: nothing is on its way any more. Whether the weights are whole, as far as that is this
        axis' business. broken: the groups do not work any more. Takes a few seconds where a rank does not answer."""
        return True

    @property
    def apart(self) -> int:
        """How many replicas make steps of their own: 1 where gradients are summed."""
        return 1

    def unite(self, state: Iterable[Tensor] = ()) -> None:
        """Replicas that train apart have one set of weights, and one `state` of the optimizer. Collective."""

    def close(self) -> None:
        """Take the hooks off the module: it serves another strategy, or none."""


def fresh(data: Tensor, old: nn.Parameter) -> nn.Parameter:
    """A parameter over `data`, trained or frozen and marked as `old` is."""
    param = nn.Parameter(data, requires_grad=old.requires_grad)
    param.__dict__.update(old.__dict__)
    return param
