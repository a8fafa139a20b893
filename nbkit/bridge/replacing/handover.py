"""Sends a new rank the user's names and the cell, before it has a Trainer. All ranks take part.

A new rank gets the names whose values are equal on all living ranks. Imports, definitions and plain values are sent by
value (see pickle_by_value.py), up to LIMIT_BYTES each. Objects of the training come with the Trainer, and their names
are bound to its attributes. A new rank does not get values that differ between ranks, are larger, or cannot be pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbkit.bridge import calls
from nbkit.bridge.calls import BroughtProject
from nbkit.bridge.runner import Runner
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.device import accelerator
from nbkit.rank.train.replace.pickle_by_value import dumps
from nbkit.rank.train.replace.resume_fit import FitRange
from nbkit.wire.cells import CellRequest


@dataclass(frozen=True)
class CellHandover:
    """The data that a new rank gets before it has a Trainer.

    trains: True if it will get a Trainer. span: the steps of the `fit` under way, or None. dtype: torch's default.
    names: names and values, pickled. bound: see RankNames. lacks: names that it does not get. project: the copied files
    to import from, or None.
    """

    request: CellRequest
    trains: bool
    span: FitRange | None
    dtype: torch.dtype
    names: bytes
    bound: dict[str, str]
    lacks: tuple[str, ...]
    project: BroughtProject | None


def hand_over(runner: Runner, trainer: Any, span: FitRange | None, newcomers: tuple[int, ...]) -> None:
    """Give the new ranks the names that are equal on all other ranks, and the cell. Collective, with `receive`."""
    shell, place = runner.shell, calls.place
    assert place is not None
    everyone = gathered(names_of(shell.user_ns, shell.user_ns_hidden, trainer))
    equal, bound, lacks = equal_names([names for names in everyone if names is not None])
    giver, handed = giver_among(newcomers), None
    if place.rank == giver:
        names = dumps({name: shell.user_ns[name] for name in sorted(equal)}, classes=True)
        request, dtype = runner.running[0].request, torch.get_default_dtype()
        project, without = calls.brought, tuple(sorted(lacks))
        handed = CellHandover(request, trainer is not None, span, dtype, names, bound, without, project)
    broadcast(handed, giver)


def receive(newcomers: tuple[int, ...]) -> CellHandover:
    """Return what the other ranks send to this new rank. Import from the same files. Collective, with `hand_over`."""
    gathered(None)
    handed: CellHandover = broadcast(None, giver_among(newcomers))
    if handed.project is not None:  # before the names are unpickled, since they may need modules of the project
        calls.use_as_others(handed.project)
    return handed


def giver_among(newcomers: tuple[int, ...]) -> int:
    """Return the rank that sends to the new ranks: the first that is not new."""
    assert calls.place is not None
    return min(set(range(calls.place.world_size)) - set(newcomers))


Told = TypeVar("Told")
Handed = TypeVar("Handed")


def gathered(told: Told) -> list[Told]:
    """Return the values of all ranks, in rank order. Collective."""
    assert calls.place is not None
    device = accelerator().device(calls.place.device)
    return all_gather_objects(told, world_size=calls.place.world_size, device=device)


def broadcast(handed: Handed | None, giver: int) -> Handed:
    """Return the value `handed` of rank `giver`. Collective."""
    assert calls.place is not None
    told: list[Any] = [handed]
    dist.broadcast_object_list(told, src=giver, device=accelerator().device(calls.place.device))
    assert told[0] is not None
    return told[0]  # type: ignore[no-any-return]


LIMIT_BYTES = 1 << 20  # of one pickled value
_OF_THE_TRAINER = ("", "job", "model", "optimizer")
_DATA = ("loop.data", "loop.eval_data")
_OF_THE_RANK = ("rank", "local_rank", "device")  # never sent: every rank has its own values


@dataclass(frozen=True)
class RankNames:
    """The names on one rank.

    digests: name -> digest of its pickled value. bound: name -> attribute of the Trainer that is its value; "" for the
    Trainer itself. others: names whose value cannot be sent.
    """

    digests: dict[str, str]
    bound: dict[str, str]
    others: tuple[str, ...]


def parts_of(trainer: Any) -> dict[str, Any]:
    """Return {attribute of the Trainer: object} for objects that a new rank makes itself; "" is the Trainer itself."""
    return {} if trainer is None else {name: getattr(trainer, name) if name else trainer for name in _OF_THE_TRAINER}


def data_of(trainer: Any) -> dict[str, Any]:
    """Return {attribute of the Trainer: data} for the data of the Trainer. A new rank has them in its own Trainer.

    Other values that refer to the data, such as a part of them, are sent with a copy of the data.
    """
    found = {} if trainer is None else {name: attrgetter(name)(trainer) for name in _DATA}
    return {name: data for name, data in found.items() if data is not None}


def names_of(namespace: Mapping[str, Any], hidden: Mapping[str, Any], trainer: Any) -> RankNames:
    """Return the names that the user has set. hidden: the names of the shell itself, which are left out."""
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
        except Exception:  # pickling a value may raise anything
            others.append(name)
    return RankNames(digests, bound, tuple(others))


def equal_names(everyone: list[RankNames]) -> tuple[set[str], dict[str, str], set[str]]:
    """Return (names that are equal on all of these ranks, names bound to the Trainer, all other names)."""
    first = everyone[0]
    equal = {name for name, mark in first.digests.items() if all(one.digests.get(name) == mark for one in everyone)}
    bound = {name: part for name, part in first.bound.items() if all(one.bound.get(name) == part for one in everyone)}
    known = {name for one in everyone for name in (*one.digests, *one.bound, *one.others)}
    return equal, bound, known - equal - set(bound)
