"""The names of a cell that a new rank gets: those that are equal on all living ranks.

Imports, definitions and plain values are sent by value (see pickle_by_value.py), up to a size. Objects of the training
come with the Trainer, and their names are bound to its attributes. A new rank does not get values that differ between
ranks, are larger, or cannot be pickled.
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
_OF_THE_RANK = ("rank", "local_rank", "device")  # never sent: every rank has its own values


@dataclass(frozen=True)
class RankNames:
    """The names on one rank.

    digests: name -> digest of its pickle. bound: name -> the Trainer's attribute, "" for the Trainer itself. others:
    names whose value cannot be sent.
    """

    digests: dict[str, str]
    bound: dict[str, str]
    others: tuple[str, ...]


def parts_of(trainer: Any) -> dict[str, Any]:
    """Return the objects that a new rank builds itself, by the Trainer's attribute; "" for the Trainer or OwnLoop."""
    return {} if trainer is None else {name: getattr(trainer, name) if name else trainer for name in _OF_THE_TRAINER}


def data_of(trainer: Any) -> dict[str, Any]:
    """Return the data that the Trainer was given, by the Trainer's attribute. A new rank has them from its own Trainer.

    In other values the data are sent by value: a part of them, or an object made from them, gets a copy.
    """
    found = {} if trainer is None else {name: attrgetter(name)(trainer) for name in _DATA}
    return {name: data for name, data in found.items() if data is not None}


def names_of(namespace: Mapping[str, Any], hidden: Mapping[str, Any], trainer: Any) -> RankNames:
    """Return the names that the user has set. hidden: names of the shell itself."""
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
    """Return (names that are equal on all of these ranks, names bound to the Trainer, all other names)."""
    first = everyone[0]
    equal = {name for name, mark in first.digests.items() if all(one.digests.get(name) == mark for one in everyone)}
    bound = {name: part for name, part in first.bound.items() if all(one.bound.get(name) == part for one in everyone)}
    known = {name for one in everyone for name in (*one.digests, *one.bound, *one.others)}
    return equal, bound, known - equal - set(bound)
