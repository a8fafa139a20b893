"""A tensor of which every rank of a group holds a part, and which looks like the whole.

`shape` and `size()` are those of the whole, so that code written for one process runs on it. What a subclass knows how
to do in parts stays in parts. Anything else gathers the whole first, with the right gradient: always right, at the
price of an all-gather, which every rank of the group makes since every rank runs the same code.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import TrainingError
from nbkit.rank.parallel.tensor.collectives import gather_from
from nbkit.rank.torch_private import tree_map_only, without_subclasses
from nbkit.tensor_layout import bounds


class InParts(Tensor):
    """Spread over `group` along the dim `along`.

    part: this rank's, an ordinary tensor with its graph. total: length of the whole along that dim.
    The object itself has no graph: whoever passes it to autograd past torch's functions is told so.
    """

    _part: Tensor
    _copies: list[tuple[Tensor, int]]
    group: dist.ProcessGroup
    total: int
    along: int

    called: ClassVar[str] = "tensor"
    way_out: ClassVar[str] = ""
    to_gather: ClassVar[str] = ""
    """For errors: what it is to the user, how to do what it cannot, and what makes it whole."""

    @staticmethod
    def __new__(cls, part: Tensor, group: dist.ProcessGroup, total: int, along: int) -> Self:
        along %= part.ndim
        shape = [total if dim == along else length for dim, length in enumerate(part.shape)]
        with_graph = part.requires_grad and torch.is_grad_enabled()
        itself: Self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=with_graph
        )
        itself._part, itself.group, itself.total, itself.along = part, group, total, along
        itself._copies = []
        if with_graph:
            # The gradient goes to the part. One that comes here was made by a torch.autograd.Function.
            with without_subclasses():
                itself.register_hook(lambda _: cls._refuse_function("torch.autograd.Function"))
        return itself

    @property
    def part(self) -> Tensor:
        """What this rank holds."""
        with without_subclasses():
            foreign = self.grad_fn
        if foreign is not None:
            self._refuse_function(foreign.name())
        if any(counter._version != seen for counter, seen in self._copies):
            # As in logits[..., 50257:].fill_(-inf): on one process that changes the tensor itself.
            self._refuse("in place, on a view of them")
        return self._part

    def like(self, part: Tensor, along: int | None = None) -> Self:
        """Another one, spread in the same way."""
        return type(self)(part, self.group, self.total, self.along if along is None else along)

    def gathered(self) -> Tensor:
        """The whole, the same on every rank. Collective over the group."""
        made = gather_from(self.part, self.group, self.along, self.total)
        if not made.is_inference():  # nobody counts how often such a tensor was changed
            self._copies.append((_counter(made), made._version))
        return made

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives in parts; NotImplemented when it takes the whole."""
        return NotImplemented

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = bounds(self.total, self.group.size(), self.group.rank())
        kind = type(self).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, holds {start}:{stop} of dim {self.along})"

    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_WRAPPER:
            with without_subclasses():
                return func(*args, **kwargs)
        if func in _OF_PART:
            return func(args[0].part)
        answer = cls.answer(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        name = getattr(func, "__name__", "")
        changes = name in _REFUSED or (name.endswith("_") and not name.endswith("__"))
        # What changes an ordinary tensor may take the whole of the others.
        if (changes and not _is_plain(args[0] if args else None)) or isinstance(kwargs.get("out"), InParts):
            cls._refuse(name)
        plain_args, plain_kwargs = tree_map_only(InParts, whole, (list(args), kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls._refuse(str(func))

    @classmethod
    def _refuse(cls, name: str) -> NoReturn:
        raise TrainingError(
            f"The {cls.called} lie in parts on the ranks of the tensor axis, and this would reach one part only.",
            numbers=f"operation {name}",
            hint=cls.way_out,
        )

    @classmethod
    def _refuse_function(cls, name: str) -> NoReturn:
        raise TrainingError(
            f"The {cls.called} lie in parts on the ranks of the tensor axis, and a torch.autograd.Function took them: "
            "their gradient would be lost.",
            numbers=name,
            hint=f"{cls.to_gather} before it, which gathers them; of a checkpoint(...): use_reentrant=False",
        )


def whole(x: Tensor) -> Tensor:
    """`x`, gathered where it lies in parts."""
    return x.gathered() if isinstance(x, InParts) else x


def _counter(x: Tensor) -> Tensor:
    """An empty tensor whose `_version` tells how often `x` was changed in place, through views too."""
    alias = x.detach()
    alias.data = x.new_empty(0)
    return alias


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, InParts)


_REFUSED = {
    "__setitem__",
    "__set__",
    "register_hook",
    "retain_grad",
    "requires_grad_",
    "register_post_accumulate_grad_hook",
}


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_OF_WRAPPER: set[Any] = {
    *_getters(
        "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_quantized", "is_nested", "is_cpu"
    ),
    *_getters("itemsize", "nbytes"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.ndimension, torch.numel),
    *(torch.is_floating_point, torch.is_complex, Tensor.__hash__),
}

_OF_PART: set[Any] = {*_getters("requires_grad", "grad_fn", "is_leaf")}


def named(*names: str) -> list[Any]:
    """The functions of torch that are called so, wherever they stand."""
    return [found for name in names for home in (torch, Tensor, F) if (found := getattr(home, name, None)) is not None]
