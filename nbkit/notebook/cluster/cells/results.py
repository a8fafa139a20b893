"""The results of a cell: values, output and status per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbkit.wire.cells import CellRecord, ranks_text


@dataclass(frozen=True)
class Results:
    """The outcome of a cell on every rank that ran it.

    values: rank -> value of the last expression. Plain data (numbers, text, lists, dicts) is the value itself, anything
    else is its text (`%pull` fetches objects). output: rank -> printed text. seconds: rank -> run time. status: "ok",
    "error" or "interrupted". generation: the number of the world's generation in which the cell ran.
    """

    values: Mapping[int, Any]
    output: Mapping[int, str]
    seconds: Mapping[int, float]
    status: str
    generation: int

    def __repr__(self) -> str:
        ranks = ranks_text(list(self.seconds))
        slowest = max(self.seconds.values(), default=0.0)
        return f"<Results of ranks {ranks}: {self.status}, {slowest:.3g} s>"


def value_of(record: CellRecord) -> Any:
    """Return a record's value for `Results.values`."""
    if record.value is not None or record.bundle is None:
        return record.value
    return record.bundle["data"].get("text/plain")


def group_by_text(records: Mapping[int, CellRecord]) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Return the values to show as [(ranks, MIME bundle)], by lowest rank. Ranks with equal values share an entry."""
    groups: list[tuple[list[int], dict[str, Any]]] = []
    for rank in sorted(records):
        bundle = records[rank].bundle
        if bundle is None:
            continue
        for ranks, shown in groups:
            if shown["data"] == bundle["data"]:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], bundle))
    return [(tuple(ranks), bundle) for ranks, bundle in groups]
