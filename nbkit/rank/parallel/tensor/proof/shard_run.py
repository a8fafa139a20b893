"""Run a module with pairs of maps whole and once for each part of a split, in one process, and compare the runs.

The maps themselves are not computed. The output of a column map is random, and a part gets its slice of it. The input
of a row map in a part must be the slice of its input in the whole run. So the module's own code runs with the sizes and
numbers of heads that it will have, and needs neither the weights of maps nor communication.

With `sequence`, positions are split around the maps. Then a part also gets its slice of the positions. At the maps, and
inside an attention, it gets the positions of all parts. See prove.py for the backward pass.

The runs use a copy of the module (`twin_of`), whose maps call the run to get their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.copies import copied, placeholder
from nbkit.rank.parallel.proof.observe import unlike
from nbkit.rank.parallel.proof.unchanged import DroppingNothing
from nbkit.rank.parallel.tensor.attention import _Weights, sizes_of_part
from nbkit.rank.parallel.tensor.layers import Around, first_tensor, mapped, put_around
from nbkit.rank.parallel.tensor.plan.linear_types import core, feature_dims, ranges_of, sizes
from nbkit.rank.parallel.tensor.plan.plan import Pair, divide
from nbkit.rank.parallel.tensor.proof.capture import BlockInput, CallArguments
from nbkit.rank.rng.seeding import set_seed
from nbkit.rank.torch_private import DropoutNd, pytree
from nbkit.tensor_layout import bounds

Answers = Mapping[str, Callable[..., Any]]
"""Functions that replace the maps of a twin. They are called with the path of the map, then the map's arguments.

"column" and "row" return the output of the map, "packed" the output of an nn.MultiheadAttention, and "attention" the
(args, kwargs) with which the attention is called.
"""


@dataclass(frozen=True)
class PairUnit:
    """A module to run whole and in `size` parts.

    module: the module of the model that contains the pairs. pairs: with paths relative to it. call: one recorded call
    of it. values: name -> value of its parameters, except those of the maps. placeholders: id of each parameter of the
    model -> placeholder. hidden: numbers of the leaves of its output that come from between the maps and are not used.
    """

    module: nn.Module
    pairs: tuple[Pair, ...]
    call: CallArguments
    size: int
    sequence: bool
    values: Mapping[str, Tensor]
    placeholders: Mapping[int, nn.Parameter]
    hidden: frozenset[int] = frozenset()

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the row maps of all pairs."""
        return tuple(pair.rows[0] for pair in self.pairs)


def twin_of(unit: PairUnit, answers: Answers, index: int | None, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the module of `unit` whose maps call `answers`, with the sizes of part `index` or of the whole.

    Its parameters besides the maps are `unit.values`. Its dropout is off.
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


def _cut(twin: nn.Module, pair: Pair, unit: PairUnit, answers: Answers, index: int | None, dtype: torch.dtype) -> None:
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
    """A map whose output is given by `_answer`."""

    _answer: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(*args, **kwargs)


class _Attention(Around):
    """An attention whose arguments are replaced by `_answer`."""

    _answer: Callable[..., Any]
    _sizes: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._answer(args, kwargs)
        with self._sizes():
            return self.plain(*args, **kwargs)


class Differs(Exception):
    """A part does not match the whole. keys: row maps of the pairs that cause it."""

    def __init__(self, keys: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.keys = tuple(keys)


@dataclass
class Point:
    """A cut in the graph: the tensors `given` go in, and the tensors `leaves` come out.

    what: "column", "row", "attention" or "module". first: number of the hidden states in `given`, for an attention.
    direct: `given` is an argument of the attention itself. cotangents: random, one for each of `given`.
    """

    what: str
    path: str
    pair: Pair
    given: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    first: int | None = None
    direct: bool = False
    cotangents: tuple[Tensor, ...] = field(default=())


class UnitRun:
    """A forward pass of a unit, whole or of one part.

    index: number of the part, None for the whole. truth: the run of the whole, if this is a part. draw: random numbers,
    whose count is a prime. uneven: use another magnitude at each position, and another mean for each part. noise: add
    noise to inputs that were computed from parameters. Raises Differs, and errors of the module.
    """

    def __init__(
        self, unit: PairUnit, draw: Tensor, *, index: int | None = None, truth: UnitRun | None = None,
        dtype: torch.dtype, uneven: bool = False, noise: bool = True,
    ) -> None:  # fmt: skip
        self.unit, self.draw, self.index, self.truth = unit, draw, index, truth
        self.dtype, self.uneven, self.noise = dtype, uneven, noise
        self.points: list[Point] = []
        self.pair_of = {path: pair for pair in unit.pairs for path in (*pair.columns, *pair.rows, pair.owner)}
        self.positions = self._drawn = 0
        self._passed: list[Tensor] = []
        answers: Answers = {"column": self.column, "row": self.row, "attention": self.attention, "packed": self.packed}
        self.twin = twin_of(unit, answers, index, dtype)
        self.params = {name: p for name, p in self.twin.named_parameters() if name in unit.values}
        args, kwargs = self._arguments()
        set_seed(0)  # so that each run draws the same random numbers
        with DroppingNothing():
            output = self._call(args, kwargs)
        self.outputs = pytree.tree_leaves(output)
        self.main = 0 if isinstance(output, Tensor) or (isinstance(output, tuple) and output) else None
        if truth is not None:
            self._compare_outputs(truth)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.twin(*args, **kwargs)
        except Differs:
            raise
        except Exception as error:
            if self.truth is None:
                raise
            through = {point.pair.rows[0] for point in self.points if point.what == "row"}
            begun = [point.pair.rows[0] for point in self.points if point.what == "column"]
            keys = [key for key in begun if key not in through] or self.unit.keys
            raise Differs(keys, f"a part of it fails: {type(error).__name__}: {str(error).strip()[:150]}") from error

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments. Those computed from parameters get noise, or the values of the whole run."""
        call, memo = self.unit.call, dict[int, Tensor]()
        shown = pytree.tree_map_only(BlockInput, lambda given: given.value, (call.args, call.kwargs))
        first = first_tensor(*shown)
        self.inputs: list[Tensor] = []
        self.hidden_input: int | None = None

        def passed(given: BlockInput) -> Tensor:
            value = given.value
            if not value.is_floating_point():
                return value
            if id(given) in memo:
                return memo[id(given)]
            is_first = first is not None and value is first
            leaf = value.to(self.dtype)
            if (is_first or given.hangs) and self.truth is None and self.noise:
                leaf = leaf + self.drawn(leaf.shape, leaf)
            if (is_first or given.hangs) and self.truth is not None:
                leaf = self.truth.inputs[len(self.inputs)].detach()
            if is_first and self.unit.sequence:
                if leaf.ndim != 3:
                    raise Differs(
                        self.unit.keys, f"its first argument has the shape {tuple(leaf.shape)}, not (B, T, D)"
                    )
                self.positions = leaf.shape[1]
                leaf = leaf if self.index is None else self.of_positions(leaf)
            if is_first or given.hangs:
                self.hidden_input = len(self.inputs) if is_first else self.hidden_input
                leaf = leaf.detach().clone().requires_grad_()
                self.inputs.append(leaf)
                leaf = leaf.clone()
            return memo.setdefault(id(given), leaf)

        args, kwargs = pytree.tree_map_only(BlockInput, passed, (call.args, call.kwargs))
        if self.unit.sequence and self.hidden_input is None:
            raise Differs(self.unit.keys, "its first argument is not a tensor of hidden states")
        return args, kwargs

    def drawn(self, shape: Sequence[int], like: Tensor) -> Tensor:
        number, many = prod(shape), len(self.draw)
        start = self._drawn
        self._drawn = (start + number) % many
        made = self.draw.repeat((start + number) // many + 1)[start : start + number].view(tuple(shape))
        if self.uneven and made.ndim:
            made = made * 10 ** made[..., :1].mul(3).cos().mul(2.5).add(0.5)
        return made.to(like.device, like.dtype if like.is_floating_point() else self.dtype)

    def _apart(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return `x` shifted up or down in alternate parts, so that no part has the mean or magnitude of the whole."""
        signs = []
        for width in widths:
            for index in range(self.unit.size):
                start, stop = bounds(width, self.unit.size, index)
                signs.append(x.new_full((stop - start,), 1.0 - 2 * (index % 2)))
        return x + 2 * torch.cat(signs) * x.abs().mean(-1, keepdim=True)

    def of_features(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return this part of `x` along its last dim, which contains concatenated matrices of `widths`."""
        assert self.index is not None
        ranges = ranges_of(widths, self.unit.size, self.index)
        return torch.cat([x[..., start:stop] for start, stop in ranges], -1)

    def of_positions(self, x: Tensor) -> Tensor:
        """Return this part of `x` along dim 1."""
        assert self.index is not None
        start, stop = bounds(x.shape[1], self.unit.size, self.index)
        return x[:, start:stop]

    def column(self, path: str, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the output of a column map for the input `x`."""
        pair = self.pair_of[path]
        widths = pair.widths[path]
        direct = any(x is passed for passed in self._passed)
        if self.truth is None:
            self._fits(path, x, sizes(self.unit.module.get_submodule(path))[0], pair)
            leaf = self.drawn((*x.shape[:-1], sum(widths)), x)
            if self.uneven:
                leaf = self._apart(leaf, widths)
            return self._go_on("column", path, pair, (x,), (leaf,), direct=direct)
        whole = self._whole("column", path, pair)
        expected = whole.given[0]
        if self.unit.sequence and pair.kind != "attention":
            expected = self.of_positions(self._with_positions(expected, pair))
        self._same(x, expected, pair, f"what goes into {path}")
        return self._go_on("column", path, pair, (x,), (self.of_features(whole.leaves[0], widths),), direct=direct)

    def row(self, path: str, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the output of a row map for the input `x`."""
        pair = self.pair_of[path]
        if self.truth is None:
            self._fits(path, x, pair.inner, pair)
            out = sizes(self.unit.module.get_submodule(path))[1]
            return self._go_on("row", path, pair, (x,), (self.drawn((*x.shape[:-1], out), x),))
        whole = self._whole("row", path, pair)
        self._same(x, self.of_features(whole.given[0], (pair.inner,)), pair, f"what goes into {path}")
        leaf = whole.leaves[0]
        if self.unit.sequence:
            leaf = self.of_positions(self._with_positions(leaf, pair))
        return self._go_on("row", path, pair, (x,), (leaf,))

    def attention(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of an attention as its wrapper would pass them. A part gets those of the whole."""
        pair, first = self.pair_of[path], first_tensor(args, kwargs)
        whole = None if self.truth is None else self._whole("attention", path, pair)
        given: list[Tensor] = []
        leaves: list[Tensor] = []
        memo: dict[int, Tensor] = {}

        def change(x: Tensor) -> Tensor:
            if not x.is_floating_point() or id(x) in memo:
                return memo.get(id(x), x)
            leaf = x.detach()
            if whole is not None:
                if len(given) >= len(whole.given):
                    raise Differs(pair.rows, f"a part calls {path} with other arguments")
                expected = leaf = whole.given[len(given)].detach()
                if self.unit.sequence and x is first:
                    expected = self.of_positions(self._with_positions(expected, pair))
                self._same(x, expected, pair, f"what goes into {path}")
            given.append(x)
            leaves.append(leaf.clone().requires_grad_(x.requires_grad or x is first))
            self._passed.append(leaves[-1].clone())
            memo[id(x)] = self._passed[-1]
            return memo[id(x)]

        args, kwargs = tuple(mapped(arg, change) for arg in args), {k: mapped(v, change) for k, v in kwargs.items()}
        number = next((i for i, x in enumerate(given) if x is first), None)
        self.points.append(Point("attention", path, pair, tuple(given), tuple(leaves), number))
        return args, kwargs

    def packed(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        """Return the output of an nn.MultiheadAttention, which can be split for any inputs."""
        pair = self.pair_of[path]
        given = [query, *(x for x in (key, value) if x is not query)]
        given += [x for x in (attn_mask, key_padding_mask) if x is not None and x.is_floating_point()]
        if self.truth is None:
            leaf = self.drawn(query.shape, query)
        else:
            whole = self._whole("module", path, pair)
            for i, (x, expected) in enumerate(zip(given, whole.given, strict=True)):
                if i == 0 and self.unit.sequence:
                    expected = self.of_positions(self._with_positions(expected, pair))
                self._same(x, expected, pair, f"what goes into {path}")
            leaf = self.of_positions(whole.leaves[0]) if self.unit.sequence else whole.leaves[0]
        y = self._go_on("module", path, pair, tuple(given), (leaf,))
        return y, _Weights() if need_weights else None

    def _go_on(
        self, what: str, path: str, pair: Pair, given: tuple[Tensor, ...], leaves: tuple[Tensor, ...], **more: Any
    ) -> Tensor:
        (leaf,) = (leaf.detach().clone().requires_grad_() for leaf in leaves)
        self.points.append(Point(what, path, pair, given, (leaf,), **more))
        return leaf.clone()  # a clone, because it may be changed in place

    def _whole(self, what: str, path: str, pair: Pair) -> Point:
        assert self.truth is not None
        point = self.truth.points[len(self.points)] if len(self.points) < len(self.truth.points) else None
        if point is None or (point.what, point.path) != (what, path):
            raise Differs(pair.rows, f"a part calls {path}, and the whole does not")
        return point

    def _with_positions(self, x: Tensor, pair: Pair) -> Tensor:
        if x.ndim != 3 or x.shape[1] != self.positions:
            raise Differs(pair.rows, f"hidden states are {tuple(x.shape)} in it, not (B, T = {self.positions}, D)")
        return x

    def _fits(self, path: str, x: Tensor, features: int, pair: Pair) -> None:
        if x.shape[-1] != features:
            raise Differs(pair.rows, f"{path} gets {x.shape[-1]} features, but has {features}")

    def _same(self, x: Tensor, expected: Tensor, pair: Pair, what: str) -> None:
        if why := unlike(x, expected, by_row=self.uneven):
            raise Differs(pair.rows, f"in a part, {what} differs from the whole: {why}")

    def _compare_outputs(self, truth: UnitRun) -> None:
        keys = self.unit.keys
        if len(self.points) != len(truth.points) or len(self.outputs) != len(truth.outputs):
            raise Differs(keys, "a part makes other calls than the whole")
        for number, (x, expected) in enumerate(zip(self.outputs, truth.outputs, strict=True)):
            if number in self.unit.hidden:
                continue
            if self.unit.sequence and number == self.main:
                expected = self.of_positions(self._with_positions(expected, self.unit.pairs[0]))
            if isinstance(x, Tensor) and isinstance(expected, Tensor):
                why = unlike(x, expected, by_row=self.uneven)
            else:
                why = "" if type(x) is type(expected) and (not isinstance(x, int | float) or x == expected) else f"{x}"
            if why:
                raise Differs(keys, f"the output of a part differs from the whole: {why}")
