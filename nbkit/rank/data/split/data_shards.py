"""Splits iterable data: finds how many shards it has, and reads one of them.

There are three kinds of such data: datasets with `shard(num_shards, index)`, as in Hugging Face; webdataset pipelines,
with a shard for each url; and data that asks `torch.utils.data.get_worker_info()` for its part, as under torch's
DataLoader. nbkit tells the last kind that there is a worker for each shard, and no other rank. nbkit itself divides the
shards over ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from inspect import getmembers_static, isfunction
from itertools import islice
from types import CodeType
from typing import Any

from nbkit.errors import TrainingError
from nbkit.rank.data.data_state import Opened, StreamPosition
from nbkit.rank.torch_private import data_worker

_PARTS = 16
"""The number of shards of data that asks for its part but reports no number. Most dp degrees divide it."""

_SPLIT_BY_PART = "num_shards = 8, and an __iter__ that gives the part of torch.utils.data.get_worker_info()"


@dataclass(frozen=True)
class DataShards:
    """`data` in `number` shards.

    by_method: True if its shard() splits it, False if it asks get_worker_info(). counted: True if the data itself
    reports the number of shards.
    """

    data: Any
    number: int
    by_method: bool
    counted: bool

    def opened(self, shard: int, epoch: int, mark: StreamPosition | None = None) -> Opened:
        """Open one shard at its beginning or at `mark`. Read it inside `reading` of the same shard."""
        if self.by_method:
            part = self.data.shard(num_shards=self.number, index=shard)
        else:
            part = self.copied()
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        return Opened.at(part, mark)

    def copied(self) -> Any:
        """Return a copy of the data, because it may remember its position and is iterated several times at once here.

        Raises TrainingError for data that cannot be copied.
        """
        try:
            return copy(self.data)
        except Exception as error:
            raise TrainingError(
                "nbkit reads shards at the same time, so it must copy the data, and the copy failed: "
                f"{type(error).__name__}: {error}",
                numbers=f"{type(self.data).__name__}, {self.number} shards",
                hint="def __copy__(self): ...   in its class; or num_shards = 1, so every rank reads all data",
            ) from error

    def first_samples(self, count: int) -> FirstSamples:
        """Read the first samples of the first shard, in a new pass."""
        with self.reading(0) as part:
            opened = self.opened(0, 0)
            samples = list(islice(opened.samples, count))
        return FirstSamples(samples, self.by_method or part.asked, opened.has_state)

    @contextmanager
    def reading(self, shard: int) -> Iterator[_Part]:
        """Make data read only this shard inside this context. Yields an object that notes whether the data asked."""
        part = _Part(shard, self.number, self.data)
        outer, data_worker._worker_info = data_worker._worker_info, None if self.by_method else part  # type: ignore[assignment]
        try:
            with nullcontext() if self.by_method else _one_rank():
                yield part
        finally:
            data_worker._worker_info = outer


@dataclass(frozen=True)
class FirstSamples:
    """The first samples. takes_part: the data reads only the part it is told to. has_state: it has a state_dict()."""

    samples: list[Any]
    takes_part: bool
    has_state: bool


class _Part:
    """A replacement for torch's WorkerInfo that notes whether it was asked."""

    def __init__(self, shard: int, number: int, data: Any) -> None:
        self._shard, self._number, self.dataset, self.seed, self.asked = shard, number, data, 0, False

    @property
    def id(self) -> int:
        self.asked = True
        return self._shard

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self._number


def data_shards(data: Any) -> DataShards | None:
    """Return how iterable `data` can be split; None if it cannot. Reads no sample."""
    if isinstance(data, Iterator):
        return None
    number = _counted(data)
    by_method = number is not None and callable(getattr(data, "shard", None))
    asks = not by_method and _asks(data)
    if number is None and asks:
        return DataShards(data, _PARTS, by_method=False, counted=False)
    if number is None or number < 2 or not (by_method or asks or isinstance(getattr(data, "pipeline", None), list)):
        return None
    return DataShards(data, number, by_method=by_method, counted=True)


def why_whole(data: Any) -> str:
    """Return why every rank reads all of iterable `data`, and what to write instead; "" if it is split."""
    if data_shards(data) is not None:
        return ""
    if isinstance(data, Iterator):
        return f"nbkit cannot split an iterator; it splits an IterableDataset with {_SPLIT_BY_PART}"
    if _counted(data) is not None and callable(getattr(data, "shard", None)):
        return "it has one shard; nbkit splits to_iterable_dataset(num_shards=8), or data of several files"
    if _counted(data) is not None:
        return f"it has one shard, or its __iter__ does not select shards; nbkit splits it with {_SPLIT_BY_PART}"
    return f"it does not say how to split it; nbkit splits it with {_SPLIT_BY_PART}"


def refuse_unasked(shards: DataShards) -> TrainingError:
    """Return the error for data that yields all samples for each of its shards."""
    return TrainingError(
        "The data has shards, but yields the same samples for each, because its __iter__ does not select a shard.",
        numbers=f"num_shards {shards.number}, {type(shards.data).__name__}",
        hint="info = torch.utils.data.get_worker_info(), and in __iter__ read the shards info.id, info.id + "
        "info.num_workers, ...; or remove num_shards",
    )


def _counted(data: Any) -> int | None:
    """Return the number of shards that the data reports; None if it reports none."""
    for name in ("num_shards", "n_shards"):
        if isinstance(number := getattr(data, name, None), int):
            return number
    stages = getattr(data, "pipeline", None)  # webdataset: the first stage yields the urls
    urls = getattr(stages[0], "urls", None) if isinstance(stages, list) and stages else None
    resampled = urls is not None and "Resampled" in type(stages[0]).__name__  # type: ignore[index]
    return len(urls) if isinstance(urls, list | tuple) and not resampled else None


def _asks(data: Any) -> bool:
    """Return True if the code of the data's own class contains the name get_worker_info."""
    kinds = [kind for kind in type(data).__mro__ if kind.__module__.partition(".")[0] not in ("builtins", "torch")]
    methods = [found for kind in kinds for _, found in getmembers_static(kind, isfunction)]
    return any(_names(method.__code__) for method in methods)


def _names(code: CodeType) -> bool:
    return "get_worker_info" in code.co_names or any(
        _names(inner) for inner in code.co_consts if isinstance(inner, CodeType)
    )


@contextmanager
def _one_rank() -> Iterator[None]:
    """Make the environment describe a single rank inside this context."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK="0", WORLD_SIZE="1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
