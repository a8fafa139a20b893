"""What every stream of data has: it gives this rank's shards of the batches, and its position is a small value.

The position is (epoch, samples taken in it): what workers have read ahead does not count, so a resumed stream misses
and repeats no sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Shard, check_rows
from nbkit.rank.data.workers import Draws

Collate = Callable[[list[Any]], Any]


def is_map_style(data: Any) -> bool:
    """Whether `data` has a length and items by index, as torch's map-style datasets have."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


@dataclass(eq=False)
class Stream(ABC):
    """Shards without end, and where it stands: `offset` samples into `epoch`.

    rank, ranks, speeds: which part of each global batch is read. own: what reading a batch draws is drawn by rank.
    goes_back: what was read can be read again. workers: processes that read ahead, where the data allows it.
    """

    data: Any
    _: KW_ONLY
    batch_size: int
    rank: int
    ranks: int
    speeds: tuple[Fraction, ...] = ()
    seed: int
    shuffle: bool
    drop_last: bool
    collate: Collate
    workers: int = 0
    epoch: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)
    own: ClassVar[bool]
    goes_back: bool = field(default=True, init=False)

    @abstractmethod
    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch. draws: what a worker that reads them draws from."""

    def recut(self, rank: int, ranks: int, speeds: tuple[Fraction, ...]) -> None:
        """From the next batch on read another part of each."""
        self.rank, self.ranks, self.speeds = rank, ranks, speeds

    def begin(self) -> None:  # noqa: B027
        """Steps are made now, by all ranks from one position."""

    def shards_end(self) -> None:  # noqa: B027
        """Some rank has told in a step that shards of the data end soon: see Shard.ends."""

    def close(self) -> None:  # noqa: B027
        """End the workers, where there are some; `next` starts others."""

    def follow(self, other: Stream) -> None:
        """Stand where `other` stands, which is not read any more."""
        other.close()
        self.seek(other.epoch, other.offset)

    def agree(self) -> None:  # noqa: B027
        """Ranks have joined: what the others have learned of the data, they know too. Collective."""

    @abstractmethod
    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Raises TrainingError when the data does not go there."""

    def where(self) -> Any:
        """What a checkpoint holds beside the position: where reading stands by the data's own state; None: nowhere.

        Collective.
        """
        return None

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """As `seek`, by what `where` has given there; warns of what is read again. Collective with the next batch."""
        self.seek(epoch, offset)

    def after(self, step: int) -> dict[str, int]:
        """Where `step` batches end, from the first sample on. Of a stream whose length nobody knows: in epoch 0."""
        return {"epoch": 0, "offset": step * self.batch_size}


@contextmanager
def reading(current: Callable[[], Stream]) -> Iterator[None]:
    """Around steps that are made: after them no workers are left. current: what is read, which may be opened anew."""
    try:
        current().begin()
        yield
    finally:
        current().close()


def fetched(data: Any, indices: list[int], mine: Sequence[int], collate: Collate) -> Shard:
    own = [indices[row] for row in mine]
    if not own:
        return Shard(None, 0, len(indices), indices)
    samples = data.__getitems__(own) if hasattr(data, "__getitems__") else [data[i] for i in own]
    return Shard(checked(collate(samples), len(own)), len(own), len(indices), indices)


def checked(batch: Any, samples: int) -> Any:
    """`batch`, which has a row for each of so many samples."""
    check_rows(batch, samples)
    return batch


def shorter(epoch: int, offset: int, samples: int) -> TrainingError:
    return TrainingError(
        "The data is shorter than where training stood in it.",
        numbers=f"position {offset} of epoch {epoch}, {samples} samples",
        hint="resume with the data that the checkpoint was made with",
    )
