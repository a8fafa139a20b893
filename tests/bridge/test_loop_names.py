"""What a loop's body has made of its names goes back, in the objects that the user holds; the rest is named."""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import Any

import numpy
import torch

import __main__
from nbkit.bridge.replacing import loop_names
from nbkit.bridge.replacing.loop_names import LoopNames


class Meter:
    def __init__(self) -> None:
        self.total, self.seen = 0.0, [1.0]


Meter.__module__ = "__main__"


def test_values_go_back_in_place_any_number_of_times() -> None:
    weight = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    names: dict[str, Any] = {
        "total": 1,
        "losses": [1.0, [2.0]],
        "by_name": {"a": [1], "b": {2, 3}},
        "last": deque([1, 2], maxlen=2),
        "mean": torch.ones(2),
        "array": numpy.ones(2),
        "counts": Counter("aab"),
        "both": (torch.zeros(1), [0]),
        "meter": Meter(),
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "model": weight,
    }
    held = dict(names)
    own = LoopNames(names, [*names, "new"], [id(weight), id(optimizer)])
    back = own.take()
    assert own.left == {}
    for _ in range(2):
        names["total"] += 1
        names["losses"].append(3.0)
        names["losses"][1].append(4.0)
        names["by_name"]["b"].add(4)
        names["by_name"]["c"] = 1
        names["last"].append(3)
        names["mean"] += 1
        names["array"] += 1
        names["counts"]["a"] += 1
        names["both"][0].add_(1)
        names["both"][1].append(1)
        names["meter"].total += 1
        names["meter"].seen.append(2.0)
        names["meter"].more = 1
        optimizer.step()
        names["schedule"].step()
        names["new"] = 1
        back()
        assert names["total"] == 1 and names["losses"] == [1.0, [2.0]] and "new" not in names
        assert names["by_name"] == {"a": [1], "b": {2, 3}} and list(names["last"]) == [1, 2]
        assert names["mean"].tolist() == [1, 1] and names["array"].tolist() == [1, 1]
        assert names["counts"] == {"a": 2, "b": 1}
        assert names["both"][0].tolist() == [0] and names["both"][1] == [0]
        assert vars(names["meter"]) == {"total": 0.0, "seen": [1.0]} and names["schedule"].last_epoch == 0
        assert all(names[name] is held[name] for name in held)


def test_what_cannot_go_back_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop_names, "LIMIT_ITEMS", 10)
    names: dict[str, Any] = {
        "numbers": iter([1]),
        "large": torch.zeros(1 << 19),
        "long": list(range(11)),
        "file": sys.stdin,
        "other": torch.nn.Linear(1, 1),
        "run": __main__,
    }
    own = LoopNames(names, names, [])
    own.take()()
    assert own.left == {
        "numbers": "list_iterator",
        "large": "Tensor",
        "long": "list",
        "file": type(sys.stdin).__name__,
        "other": "Linear",
    }
