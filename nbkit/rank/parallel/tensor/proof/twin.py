"""A copy of a module in which the maps of its pairs are not computed: a run says what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.meta_module import copied, placeholder
from nbkit.rank.parallel.tensor.attention import sizes_of_part
from nbkit.rank.parallel.tensor.column_row_pair import Around, put_around
from nbkit.rank.parallel.tensor.plan.heads import divide
from nbkit.rank.parallel.tensor.plan.linear_types import core, feature_dims, ranges_of, sizes
from nbkit.rank.parallel.tensor.plan.plan import Pair
from nbkit.rank.parallel.tensor.proof.capture import Call
from nbkit.rank.torch_private import DropoutNd

Answers = Mapping[str, Callable[..., Any]]
"""Who answers for the maps of a twin, given the path from the twin and then what the map is called with: "column" and
"row" give its output, "packed" that of an nn.MultiheadAttention, "attention" the (args, kwargs) to go on with."""


@dataclass(frozen=True)
class Unit:
    """module: that holds the pairs, as it is in the model; pairs: by paths from it; call: of it, as it was seen.

    values: of its parameters but those of the maps, by name. placeholders: by ids, of all parameters of the model.
    hidden: leaves of its output that come from between the maps, and that nobody uses.
    """

    module: nn.Module
    pairs: tuple[Pair, ...]
    call: Call
    size: int
    sequence: bool
    values: Mapping[str, Tensor]
    placeholders: Mapping[int, nn.Parameter]
    hidden: frozenset[int] = frozenset()

    @property
    def keys(self) -> tuple[str, ...]:
        """Row maps of all pairs."""
        return tuple(pair.rows[0] for pair in self.pairs)


def twin_of(unit: Unit, answers: Answers, index: int | None, dtype: torch.dtype) -> nn.Module:
    """A copy of the module of `unit` whose maps ask `answers`: with the sizes of part `index`, or of the whole.

    Its parameters beside the maps are those of `unit.values`; it drops nothing.
    """
    memo: dict[int, Any] = dict(unit.placeholders)
    for name, p in unit.module.named_parameters():
        if (value := unit.values.get(name)) is not None:
            memo[id(p)] = _parameter(value, dtype)
    for part in unit.module.modules():
        if (config := vars(part).get("config")) is not None:
            memo[id(config)] = config
    twin = copied(unit.module, memo)
    if not unit.call.training:
        twin.eval()
    for part in twin.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
        if isinstance(part, (DropoutNd, nn.MultiheadAttention)):
            part.eval()
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
    for pair in unit.pairs:
        _cut(twin, pair, unit, answers, index, dtype)
    return twin


def _cut(twin: nn.Module, pair: Pair, unit: Unit, answers: Answers, index: int | None, dtype: torch.dtype) -> None:
    owner = twin.get_submodule(pair.owner)
    if pair.kind == "module":
        put_around(owner, _Answered, _answer=partial(answers["packed"], pair.owner))
        return
    for path in (*pair.columns, *pair.rows):
        part = twin.get_submodule(path)
        base, column = core(part), path in pair.columns
        dim = feature_dims(part)[column]
        length = sizes(part)[column]
        if index is not None:
            widths = pair.widths[path] if column else (length,)
            length = sum(stop - start for start, stop in ranges_of(widths, unit.size, index))
            linear, conv = ("out_features", "nf") if column else ("in_features", "nx")
            setattr(base, linear if hasattr(base, linear) else conv, length)
        for name, along in (("weight", dim), ("bias", 0 if column else None)):
            if (param := base._parameters.get(name)) is not None:
                shape = tuple(length if d == along else n for d, n in enumerate(param.shape))
                base._parameters[name] = placeholder(shape, nn.Parameter(param.detach()[:0].to(dtype)))
        put_around(part, _Answered, _answer=partial(answers["column" if column else "row"], path))
    if index is not None:
        divide(owner, pair.counts, unit.size)
    if pair.kind == "attention":
        answer, around = partial(answers["attention"], pair.owner), None if index is None else pair
        put_around(owner, _Attention, _answer=answer, _sizes=sizes_of_part(around, unit.size))


def _parameter(value: Tensor, dtype: torch.dtype) -> nn.Parameter:
    number = value.is_floating_point()
    return nn.Parameter(value.to(dtype) if number else value, requires_grad=number)


class _Answered(Around):
    """A map whose output is given."""

    _answer: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(*args, **kwargs)


class _Attention(Around):
    """An attention whose arguments are given."""

    _answer: Callable[..., Any]
    _sizes: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._answer(args, kwargs)
        with self._sizes():
            return self.plain(*args, **kwargs)
