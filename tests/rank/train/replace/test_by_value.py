"""Test that definitions of a cell work in another process of the same program, here under another `__main__`."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nbkit.rank.parallel.module.copies import homes, replace_submodule, skeleton_of
from nbkit.rank.train.replace.pickle_by_value import TooLarge, dumps, loads
from verify.models.bound import MODELS, batch, built

NOT_CARRIED = {"local class", "global"}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_CARRIED])
def test_parts_of_a_model_held_by_functions_are_pickled_with_it(name: str) -> None:
    model, values = built(name), batch()[0]
    carried = loads(dumps(skeleton_of(model)))
    for path, places in homes(carried).items():
        replace_submodule(places, nn.Parameter(model.get_parameter(path).detach().clone()))
    assert torch.equal(carried(values), model(values))


def test_weak_references_of_every_kind_refer_to_the_unpickled_objects() -> None:
    one, gone = nn.Linear(1, 1), nn.Linear(1, 1)
    weak = [weakref.ref(one), weakref.WeakMethod(one.forward), weakref.ref(gone), weakref.WeakMethod(gone.forward)]
    weak += [weakref.WeakSet([one, gone]), weakref.WeakKeyDictionary({one: 1}), weakref.WeakValueDictionary({"a": one})]
    del gone
    carried, (ref, method, *dead, members, keys, values) = loads(dumps((one, weak)))
    assert ref() is carried and method().__self__ is carried and [each() for each in dead] == [None, None]
    assert list(members) == [carried] and dict(keys) == {carried: 1} and dict(values) == {"a": carried}
    del carried
    assert (ref(), method(), len(members), len(keys), len(values)) == (None, None, 0, 0, 0)


CELL = """
import abc, math
from dataclasses import dataclass, field
import torch
from torch import nn
from torch.nn import functional as F

def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)

def times(k):
    def count(n):
        return 0 if n == 0 else k + count(n - 1)
    return count

three = times(3)

class Base(nn.Module):
    scale: int = 2

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @property
    def twice(self):
        return 2 * self.scale

    @classmethod
    def called(cls):
        return cls.__name__

    def forward(self, x):
        return F.relu(self.linear(x)) * self.scale

class Net(Base):
    def forward(self, x):
        return super().forward(x) + 1

@dataclass(frozen=True)
class Config:
    width: int = 1
    names: list = field(default_factory=list)

class Abstract(abc.ABC):
    @abc.abstractmethod
    def act(self): ...

config = Config(5)
net = Net()
tensor = torch.arange(6.0).reshape(2, 3)
rows = [row for row in torch.arange(12).reshape(4, 3)] + [tensor.t(), tensor[1:, ::2]]
plus = lambda x, y=config: x + y.width + offset
offset = 1
"""
DEFINED = (
    "F",
    "factorial",
    "times",
    "three",
    "Base",
    "Net",
    "Config",
    "Abstract",
    "config",
    "tensor",
    "rows",
    "plus",
    "offset",
)


def main_module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return vars(module)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    names = main_module(monkeypatch)
    exec(compile(CELL, "/tmp/ipykernel_17/1.py", "exec"), names)
    yield names


def test_definitions_work_in_another_process(cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    packed = dumps({name: cell[name] for name in (*DEFINED, "net")}, classes=True)
    there = main_module(monkeypatch)
    there.update(loads(packed))
    assert there["factorial"](5) == 120
    assert there["three"](4) == 12
    assert there["Net"].called() == "Net"
    assert there["net"].twice == 4
    assert type(there["net"]) is there["Net"]
    assert torch.equal(there["net"](torch.ones(3)), cell["net"](torch.ones(3)))
    assert isinstance(there["config"], there["Config"])
    assert there["Config"]().names == []
    assert torch.equal(there["tensor"], cell["tensor"])
    assert all(torch.equal(here, there) for here, there in zip(cell["rows"], there["rows"], strict=True))
    assert there["rows"][-1].data_ptr() == there["tensor"].data_ptr() + 12  # they share a storage there too
    with pytest.raises(TypeError, match="abstract"):
        there["Abstract"]()
    there["offset"] = 10  # like an assignment in a later cell
    assert there["plus"](1) == 16


def test_equal_definitions_give_equal_pickles_even_after_unpickling(
    cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {name: dumps(cell[name], classes=True) for name in DEFINED}
    packed = dumps({name: cell[name] for name in DEFINED}, classes=True)
    again = main_module(monkeypatch)
    exec(compile(CELL, "/tmp/ipykernel_4711/1.py", "exec"), again)
    assert {name: dumps(again[name], classes=True) for name in DEFINED} == here
    there = main_module(monkeypatch)
    there.update(loads(packed))
    assert {name: dumps(there[name], classes=True) for name in DEFINED} == here


def test_objects_that_are_too_large_or_foreign_are_refused(cell: dict[str, Any]) -> None:
    with pytest.raises(TooLarge):
        dumps(torch.zeros(1000), limit=1000)
    with pytest.raises(TooLarge):
        dumps("x" * 2000, limit=1000)
    with pytest.raises(Exception, match="not sent"):
        dumps([cell["config"]], classes=True, foreign={id(cell["config"])})


def test_classes_of_a_cell_are_pickled_by_name_for_a_process_that_has_them(cell: dict[str, Any]) -> None:
    assert loads(dumps(cell["net"])).__class__ is cell["Net"]
    assert loads(dumps(cell["net"], classes=True)).__class__ is not cell["Net"]
