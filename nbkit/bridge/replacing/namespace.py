"""What a new rank gets of the names of a cell: those that are equal on all ranks that live.

Imports, definitions and plain values go by value (see pickle_by_value.py), up to a size. What belongs to the training
comes with the Trainer, and its names are bound to that. What differs between ranks, is larger, or cannot be pickled,
the new rank does not get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbkit.rank.train.replace.pickle_by_value import dumps

LIMIT_BYTES = 1 << 20  # of one value
_OF_THE_TRAINER = ("", "model", "optimizer")
_OF_THE_RANK = ("rank", "local_rank", "device")  # every rank has its own, though one alone differs from nobody


@dataclass(frozen=True)
class Names:
    """Of one rank. digests: name -> of its pickle. bound: name -> the Trainer's attribute, "" for the Trainer."""

    digests: dict[str, str]
    bound: dict[str, str]
    others: tuple[str, ...]


def names_of(namespace: Mapping[str, Any], hidden: Mapping[str, Any], trainer: Any) -> Names:
    """The names that the user has given. hidden: those of the shell itself."""
    parts, foreign = dict[int, str](), set[int]()
    if trainer is not None:
        parts = {id(getattr(trainer, name) if name else trainer): name for name in _OF_THE_TRAINER}
        foreign = {*parts, id(trainer.job)}
    digests, bound, others = dict[str, str](), dict[str, str](), list[str]()
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in _OF_THE_RANK or (name in hidden and hidden[name] is value):
            continue
        if id(value) in parts:
            bound[name] = parts[id(value)]
            continue
        try:
            digests[name] = hashlib.sha256(dumps(value, classes=True, foreign=foreign, limit=LIMIT_BYTES)).hexdigest()
        except Exception:  # whatever a value raises when it is pickled
            others.append(name)
    return Names(digests, bound, tuple(others))


def equal_names(everyone: list[Names]) -> tuple[set[str], dict[str, str], set[str]]:
    """(names that are equal on all of these ranks, the Trainer's, the others)."""
    first = everyone[0]
    equal = {name for name, mark in first.digests.items() if all(one.digests.get(name) == mark for one in everyone)}
    bound = {name: part for name, part in first.bound.items() if all(one.bound.get(name) == part for one in everyone)}
    known = {name for one in everyone for name in (*one.digests, *one.bound, *one.others)}
    return equal, bound, known - equal - set(bound)
