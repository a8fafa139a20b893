"""What a new rank gets of the names of a cell: those that are equal on all ranks that live.

Imports, definitions and plain values go by value (see pickle_by_value.py), up to a size. What belongs to the training
comes with the Trainer, and its names are bound to that. What differs between ranks, is larger, or cannot be pickled,
the new rank does not get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from nbkit.rank.train.replace.pickle_by_value import dumps

LIMIT_BYTES = 1 << 20  # of one value
_OF_THE_TRAINER = ("", "job", "model", "optimizer")
_DATA = ("loop.data", "loop.eval_data")
_OF_THE_RANK = ("rank", "local_rank", "device")  # every rank has its own, though one alone differs from nobody


@dataclass(frozen=True)
class RankNames:
    """Of one rank. digests: name -> of its pickle. bound: name -> the Trainer's attribute, "" for the Trainer."""

    digests: dict[str, str]
    bound: dict[str, str]
    others: tuple[str, ...]


def parts_of(trainer: Any) -> dict[str, Any]:
    """Return what a new rank has of its own, by the Trainer's attribute; "" for the Trainer, or the OwnLoop."""
    return {} if trainer is None else {name: getattr(trainer, name) if name else trainer for name in _OF_THE_TRAINER}


def data_of(trainer: Any) -> dict[str, Any]:
    """The data that it has been given, by the Trainer's attribute: what it learns of them is in the Trainer's own.

    Beside other names it is by value: a part of it, or what is made of it, has a copy.
    """
    found = {} if trainer is None else {name: attrgetter(name)(trainer) for name in _DATA}
    return {name: data for name, data in found.items() if data is not None}


def names_of(namespace: Mapping[str, Any], hidden: Mapping[str, Any], trainer: Any) -> RankNames:
    """Return the names that the user has given. hidden: those of the shell itself."""
    parts = {id(part): name for name, part in parts_of(trainer).items()}
    bindable = {id(data): name for name, data in data_of(trainer).items()} | parts
    digests, bound, others = dict[str, str](), dict[str, str](), list[str]()
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in _OF_THE_RANK or (name in hidden and hidden[name] is value):
            continue
        if id(value) in bindable:
            bound[name] = bindable[id(value)]
            continue
        try:
            pickled = dumps(value, classes=True, limit=LIMIT_BYTES, foreign=parts)
            digests[name] = hashlib.sha256(pickled).hexdigest()
        except Exception:  # whatever a value raises when it is pickled
            others.append(name)
    return RankNames(digests, bound, tuple(others))


def equal_names(everyone: list[RankNames]) -> tuple[set[str], dict[str, str], set[str]]:
    """(names that are equal on all of these ranks, the Trainer's, the others)."""
    first = everyone[0]
    equal = {name for name, mark in first.digests.items() if all(one.digests.get(name) == mark for one in everyone)}
    bound = {name: part for name, part in first.bound.items() if all(one.bound.get(name) == part for one in everyone)}
    known = {name for one in everyone for name in (*one.digests, *one.bound, *one.others)}
    return equal, bound, known - equal - set(bound)
