"""Batches: the rows of a global batch that belong to this rank, how to cut them, and how to call a model on them.

Rows are dim 0 of every tensor in a batch. If B rows of a global batch are divided over R ranks, each rank gets
contiguous rows. If R does not divide B, the first B mod R ranks get one row more, and the last ranks may get none. With
balanced data, ranks get rows of the same total cost instead, from anywhere in the batch.

`BatchSplit` cuts a global batch: `global 64 = micro 8 x accum 2 x dp 4`. The global batch never changes by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from nbkit.device_speeds import rows_by_speed
from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.strategy import Strategy
from nbkit.tensor_layout import bounds

__all__ = [
    "Shard",
    "bounds",
    "call",
    "check_inputs",
    "fingerprint",
    "numbers_of",
    "on_device",
    "pair",
    "parts_by_speed",
    "pick",
    "rows_of",
    "shapes_of",
    "shard_of",
    "take",
    "tokens_of",
]


Parts = Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one global batch.

    data: the collated rows, None if the rank has none. rows: the number of this rank's rows. total: the number of rows
    of the global batch.
    indices: dataset index (or position in the stream) of each row of the global batch.
    fingerprint: equal on all ranks if and only if they read the same stream; 0 if streams cannot differ.
    everything: returns the arguments of a Sample of the whole global batch; None if this rank has not read all of it.
    parts: for each rank, the numbers of its rows in the global batch; None if rows are contiguous.
    ends: True if this rank has found that shards of the data end in one of the next batches. Other ranks do not know it
    yet.
    hears: called with the indices of this rank's samples and their losses; None if nobody needs them.
    """

    data: Any
    rows: int
    total: int
    indices: Sequence[int]
    fingerprint: int = 0
    everything: Callable[[], tuple[Any, ...]] | None = None
    parts: Parts = None
    ends: bool = False
    hears: Callable[[Sequence[int], Tensor], None] | None = None

    def most(self, ranks: int) -> int:
        """Return the largest number of rows of any rank."""
        return bounds(self.total, ranks, 0)[1] if self.parts is None else max(map(len, self.parts))


def parts_by_speed(total: int, speeds: tuple[Fraction, ...]) -> Parts:
    """Return contiguous rows for ranks of these speeds; None without speeds, when all ranks have equal numbers."""
    return tuple(range(*rows) for rows in rows_by_speed(total, speeds)) if speeds else None


def numbers_of(parts: Parts, total: int, ranks: int, rank: int) -> Sequence[int]:
    """Return the numbers of the rows of `rank` in a global batch of `total` rows. parts: see Shard."""
    return range(*bounds(total, ranks, rank)) if parts is None else parts[rank]


def rows_of(batch: Any) -> int:
    """Return the number of rows of a collated batch: the length of its first tensor (or list of values)."""
    if isinstance(batch, Tensor):
        if batch.is_nested or batch.layout is not torch.strided:
            raise _in_no_rows(*(_NESTED if batch.is_nested else _SPARSE))
        if batch.ndim == 0:
            raise TrainingError(
                "A batch holds a tensor without rows.",
                numbers="shape ()",
                hint="collate the samples so that dim 0 of every tensor is the sample",
            )
        return batch.shape[0]
    if isinstance(batch, Mapping) and batch:
        return rows_of(next(iter(batch.values())))
    if isinstance(batch, tuple | list) and batch:
        return rows_of(batch[0]) if isinstance(batch[0], Tensor | Mapping | tuple | list) else len(batch)
    raise TrainingError(
        "The batch has no tensor whose rows nbkit can count.",
        numbers=f"got {type(batch).__name__}",
        hint="yield (input, target) tensors, or a dict of tensors with inputs=[...]; for graphs, pad the nodes to "
        "one number and add a mask",
    )


def check_rows(batch: Any, samples: int) -> None:
    """Raise TrainingError if a collated batch does not have one row for each of `samples` samples."""
    if (rows := rows_of(batch)) != samples:
        raise _without_rows(batch, samples) or TrainingError(
            "The collated batch does not have one row for each sample.",
            numbers=f"{samples} samples, {rows} rows",
            hint="collate so that dim 0 of every tensor is the sample",
        )


def _without_rows(batch: Any, samples: int | None) -> TrainingError | None:
    """Return the error for a batch of a kind that cannot be cut by rows; None for any other batch."""
    if (found := _ragged(batch)) is not None:
        return _in_no_rows(*found)
    first = next(_tensors(batch), None)
    if samples is not None and first is not None and first.ndim > 1 and first.shape[1] == samples:
        return TrainingError(
            "The first dim of the batch is not the sample, but another dim, such as time.",
            numbers=f"shape {tuple(first.shape)}, {samples} samples in dim 1",
            hint="put samples first, as default_collate does, and x.transpose(0, 1) in the model's forward; or "
            "batch_first=True in its layers",
        )
    return None


_SPARSE = "a sparse tensor", "loading=nbkit.Loading(collate=...) with t.to_dense()"
_NESTED = "a nested tensor", "loading=nbkit.Loading(collate=...) with torch.nested.to_padded_tensor(t, 0), and a mask"


def _in_no_rows(kind: str, hint: str) -> TrainingError:
    return TrainingError(f"A batch holds {kind}, so nbkit cannot cut it into rows.", hint=hint)


def _ragged(part: Any) -> tuple[str, str] | None:
    """Return (name of a part without rows of equal size, what to use instead); None if there is no such part."""
    if isinstance(part, PackedSequence):
        return "a PackedSequence", (
            "loading=nbkit.Loading(collate=...) with pad_sequence(rows, batch_first=True) and the lengths; "
            "pack_padded_sequence(x, "
            "lengths.cpu(), batch_first=True, enforce_sorted=False) in the model's forward"
        )
    if isinstance(part, Tensor):
        if part.is_nested:
            return _NESTED
        return _SPARSE if part.layout != torch.strided else None
    # A list of two tensors may be two inputs of a model, and one of these may have another number of rows.
    if isinstance(part, list) and len(part) > 2 and all(isinstance(one, Tensor) for one in part):
        alike = len({(one.ndim, one.dtype) for one in part}) == 1
        return _list("tensors of unequal shapes") if alike and len({one.shape for one in part}) > 1 else None
    if isinstance(part, list) and part and all(isinstance(one, Mapping) for one in part):
        return _list("dicts")
    if isinstance(part, tuple | list | Mapping):
        each = part.values() if isinstance(part, Mapping) else part
        return next((found for one in each if (found := _ragged(one)) is not None), None)
    return None


def _list(of: str) -> tuple[str, str]:
    return f"a list of {of}", (
        "loading=nbkit.Loading(collate=...) that gives one tensor of each kind: images of one size, boxes padded "
        "to one number "
        "with a mask"
    )


def take(batch: Any, start: int, stop: int, *, rows: int) -> Any:
    """Return rows start to stop - 1 of a batch of `rows` rows, from every tensor, and from lists with an entry per row.

    Tensors are views, not copies. A single number is shared by all rows. Raises TrainingError if a part of the batch
    has another number of rows.
    """
    if (start, stop) == (0, rows):
        return batch
    return _cut(batch, lambda part: part[start:stop], rows)


def pick(batch: Any, chosen: Sequence[int], *, rows: int) -> Any:
    """Return copies of the rows `chosen` of a batch of `rows` rows, in that order. Raises the errors of `take`."""

    def of(part: Any) -> Any:
        if isinstance(part, tuple | list):
            return [part[i] for i in chosen]
        return part[torch.tensor(chosen, device=part.device)] if isinstance(part, Tensor) else part[list(chosen)]

    return _cut(batch, of, rows)


def _cut(batch: Any, of: Callable[[Any], Any], rows: int) -> Any:
    try:
        return _cut_parts(batch, of, rows)
    except _Uneven as uneven:
        raise _without_rows(batch, uneven.rows) or TrainingError(
            "A part of the batch has a different number of rows, so nbkit cannot cut it for ranks or micro-batches.",
            numbers=f"{uneven.what}, beside {rows} rows",
            hint="give it a row per sample: mask.expand(rows, ...); or keep it in the model as a buffer",
        ) from None


class _Uneven(Exception):
    """A part of a batch has another number of rows than its first part."""

    def __init__(self, what: str, rows: int | None) -> None:
        self.what, self.rows = what, rows


def _cut_parts(batch: Any, of: Callable[[Any], Any], rows: int) -> Any:
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor | Mapping | tuple | list):
        # These are the parts of a batch (input, target), even if their number equals the number of rows.
        return [_rows(part, of, rows) for part in batch]
    return _rows(batch, of, rows)


def _rows(part: Any, of: Callable[[Any], Any], rows: int) -> Any:
    if isinstance(part, Mapping):
        return {key: _rows(value, of, rows) for key, value in part.items()}
    if isinstance(part, tuple | list):
        if len(part) == rows and not _each_has(part, rows):
            return of(part)
        if any(isinstance(inner, Tensor | Mapping | tuple | list) for inner in part):
            return [_rows(inner, of, rows) for inner in part]
    if isinstance(part, Tensor) and (part.is_nested or part.layout is not torch.strided):
        raise _Uneven("a nested or sparse tensor", None)
    # numpy arrays have a shape too.
    shape = getattr(part, "shape", None)
    if shape is not None and tuple(shape[:1]) == (rows,):
        return of(part)
    if shape is not None or (isinstance(part, tuple | list) and part):
        # Only a part with one dim may be the target of samples along dim 1.
        count = len(part) if shape is None else int(shape[0]) if len(shape) == 1 else None
        raise _Uneven(f"shape {tuple(shape)}" if shape is not None else f"{count} values", count)
    return part


def _each_has(parts: Sequence[Any], rows: int) -> bool:
    """Return True if these are tensors of `rows` rows (or tuples of them), so they are not entries of single rows."""
    return all(
        part.shape[:1] == (rows,)
        if isinstance(part, Tensor)
        else isinstance(part, tuple | list) and _each_has(part, rows)
        for part in parts
    )


def shard_of(batch: Any, *, ranks: int, rank: int, speeds: tuple[Fraction, ...] = ()) -> Shard:
    """Return the rows of `rank` in a global batch that every rank holds. speeds: speeds of the ranks, if unequal."""
    total = rows_of(batch)
    parts = parts_by_speed(total, speeds)
    start, stop = bounds(total, ranks, rank) if parts is None else rows_by_speed(total, speeds)[rank]
    own = take(batch, start, stop, rows=total) if stop > start else None
    return Shard(own, stop - start, total, range(total), fingerprint(batch, total), lambda: (batch,), parts)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`. Copies to a GPU are asynchronous."""
    if isinstance(batch, Tensor):
        return accelerator().send(batch, device)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [on_device(value, device) for value in batch]
    return batch


def pair(batch: Any, inputs: Sequence[str] | None) -> tuple[Any, Any]:
    """Return (input of the model, second argument of the loss). inputs: names, or a function of the batch."""
    if callable(inputs):
        return inputs(batch), batch
    if inputs is not None:
        if not isinstance(batch, Mapping) or (missing := [key for key in inputs if key not in batch]):
            held = f"keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise TrainingError(
                "inputs= has names that are not in the batch.",
                numbers=f"inputs {', '.join(inputs)}; the batch is {held}"
                + (f"; missing {', '.join(missing)}" if isinstance(batch, Mapping) else ""),
                hint="inputs=[...] with keys of the items" if isinstance(batch, Mapping) else "leave inputs= out",
            )
        return {key: batch[key] for key in inputs}, batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    keys = f"a dict with keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise TrainingError(
        "Items are neither (input, target) nor dicts with inputs= for the model.",
        numbers=f"a batch is {keys}" + (f" of {len(batch)} parts" if isinstance(batch, tuple | list) else ""),
        hint="inputs=['...'] names the keys that the model takes"
        if isinstance(batch, Mapping)
        else "let the dataset give (input, target)",
    )


def check_inputs(inputs: Sequence[str] | None) -> None:
    """Raise TrainingError for the input num_items_in_batch of `transformers`, because it has no rows."""
    if inputs is not None and not callable(inputs) and "num_items_in_batch" in inputs:
        raise TrainingError(
            "num_items_in_batch= counts targets of the whole batch, but the model on a rank gets only a part of the "
            "batch.",
            numbers=f"inputs {', '.join(inputs)}",
            hint="leave it out of inputs=: the targets are counted over the whole batch anyway",
        )


def call(model: nn.Module, value: Any) -> Any:
    """Call the model: tensor -> model(x); tuple or list -> model(*x); dict -> model(**x)."""
    if isinstance(value, Tensor):
        return model(value)
    if isinstance(value, Mapping):
        return model(**value)
    return model(*value) if isinstance(value, tuple | list) else model(value)


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """Return shape and dtype of all tensors in a batch. Micro-batches with equal results can share buffers."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in _tensors(batch))


def tokens_of(value: Any, rows: int) -> int:
    """Return the number of tokens in a model input.

    This is the number of elements of the first tensor if it has 2 dims and an integer dtype, else `rows`.
    """
    while isinstance(value, (tuple, list, Mapping)) and value:
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    is_ids = isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()
    return value.numel() if is_ids else rows


def fingerprint(batch: Any, rows: int) -> int:
    """Return a checksum of the first and the last row, by which ranks check that they read the same stream."""
    checksum = zlib.crc32(str(rows).encode())
    for tensor in _tensors(batch):
        if tensor.device.type == "cpu":
            for end in (tensor[:1], tensor[-1:]) if tensor.ndim else (tensor,):
                raw = end.detach().contiguous().reshape(-1).view(torch.uint8)
                checksum = zlib.crc32(raw.numpy().tobytes(), checksum)
    return checksum


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, Mapping)):
        for value in batch if isinstance(batch, (tuple, list)) else batch.values():
            yield from _tensors(value)


def steps_of_epoch(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of global batches in one pass over `samples` samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


@dataclass(frozen=True)
class BatchSplit:
    """A split of a global batch: total rows = micro rows per rank and forward x accum forwards x dp ranks.

    rows: the number of rows of each dp rank, if speeds are unequal. A forward then has at most `micro` rows.
    """

    total: int
    micro: int
    dp: int
    rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch_size: int, strategy: Strategy, *, microbatch_size: int | None) -> BatchSplit:
        """Return the split of `batch_size`. If it cannot be split, raises TrainingError with the nearest valid sizes.

        A pipeline cuts a rank's rows into `strategy.microbatches` micro-batches, and ignores `microbatch_size`.
        """
        dp = strategy.dp
        if batch_size < 1 or (microbatch_size is not None and microbatch_size < 1):
            raise TrainingError(
                "batch_size and microbatch_size must be at least 1.",
                numbers=f"batch_size={batch_size}, microbatch_size={microbatch_size}",
                hint=f"batch_size={dp}",
            )
        if strategy.replica_speeds:
            by_speed = tuple(stop - start for start, stop in strategy.rows(batch_size))
            most = max(by_speed)
            return cls(batch_size, min(microbatch_size or most, most), dp, by_speed)
        if batch_size % dp:
            below, above = batch_size // dp * dp, (batch_size // dp + 1) * dp
            raise TrainingError(
                "The global batch is smaller than the number of ranks."
                if batch_size < dp
                else "The global batch cannot be divided evenly by the number of ranks.",
                numbers=f"batch_size {batch_size} / dp {dp} = {batch_size / dp:g} rows per rank",
                hint=f"batch_size={above}" + (f" or {below}" if below else ""),
            )
        rows = batch_size // dp
        name, asked = "microbatches", strategy.microbatches
        what = "The rows of a rank cannot be divided evenly into the micro-batches of the pipeline."
        if asked is None:
            name, asked = "microbatch_size", microbatch_size or rows
            what = "The rows of a rank cannot be divided evenly into micro-batches of this size."
        if rows % asked:
            fitting = [n for n in range(1, rows + 1) if rows % n == 0]
            raise TrainingError(
                what,
                numbers=f"batch_size {batch_size} / dp {dp} = {rows} rows per rank, / {name} {asked} = "
                f"{rows / asked:g}",
                hint=f"{name}={min(fitting, key=lambda n: abs(n - asked))}   "
                f"(fitting: {', '.join(map(str, fitting[:12]))}{', ...' * (len(fitting) > 12)})",
            )
        return cls(total=batch_size, micro=asked if strategy.microbatches is None else rows // asked, dp=dp)

    @property
    def accum(self) -> int:
        """Return the number of forward passes per rank and step."""
        return -(-max(self.rows or (self.total // self.dp,)) // self.micro)

    def __str__(self) -> str:
        if self.rows:
            return f"global {self.total} = {' + '.join(map(str, self.rows))} rows by speed, micro {self.micro} at most"
        return f"global {self.total} = micro {self.micro} x accum {self.accum} x dp {self.dp}"
