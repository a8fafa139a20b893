"""Test push and pull between a process without torch and ranks with torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nbkit import Cluster
from nbkit.errors import TransferError, UsageError
from nbkit.notebook.cluster import registry
from nbkit.wire import parcel


@pytest.fixture(scope="module")
def spare(nbkit_home: Path) -> Iterator[str]:
    """Yield the name of an unused cluster, for other processes than this one, which has imported torch."""
    cluster = Cluster.start(2, cpu=True, name="spare", ttl=600)
    cluster.connection.close("another process takes it")
    yield "spare"
    registry.end(registry.running("spare"))


def run_beside(name: str, code: str) -> str:
    """Return what `code` prints in a fresh process that has taken the cluster, as `cluster`."""
    code = f"import sys; from nbkit import Cluster\ncluster = Cluster.attach({name!r}, take=True)\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_pushed_values_arrive_on_every_rank(two: Cluster) -> None:
    two.push({"lr": 0.1, "names": ["a", "b"], "table": {"x": (1, 2)}})
    assert two.run("lr, names, table").values == {r: (0.1, ["a", "b"], {"x": (1, 2)}) for r in range(2)}


def test_an_array_arrives_writable_and_private_to_each_rank(two: Cluster) -> None:
    two.push({"array": np.arange(6, dtype=np.float32).reshape(2, 3)})
    two.run("array += rank")
    assert np.array_equal(two.pull("array", 0), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert np.array_equal(two.pull("array", 1), np.arange(6, dtype=np.float32).reshape(2, 3) + 1)


@pytest.mark.long
def test_a_tensor_is_pulled_as_an_array_if_torch_is_not_imported(spare: str) -> None:
    shown = run_beside(
        spare,
        'value = cluster.pull(\'{"w": torch.arange(3.0), "h": torch.ones(2, dtype=torch.bfloat16)}\', 1)\n'
        "print(type(value['w']).__name__, value['w'].tolist(), value['h'].tolist(), 'torch' in sys.modules)\n",
    )
    assert shown.strip() == "ndarray [0.0, 1.0, 2.0] [1.0, 1.0] False"


def test_pull_from_several_ranks_returns_a_list(two: Cluster) -> None:
    two.run("mine = rank * 2")
    assert two.pull("mine", None) == [0, 2]
    assert two.pull("mine", [1]) == [2]


def test_a_value_that_a_rank_lacks_is_named_as_typed(two: Cluster) -> None:
    with pytest.raises(TransferError, match=r"'nothing' has no value on rank 1\.\nNameError.*\n→ %%rank 1"):
        two.pull("nothing", 1)


def test_nothing_stays_in_shared_memory(two: Cluster) -> None:
    before = set(parcel.folder().glob("nbkit-*"))
    two.push({"big": np.zeros(1_000_000)})
    two.pull("big", None)
    assert set(parcel.folder().glob("nbkit-*")) <= before


def test_a_value_that_is_too_large_is_refused_with_its_size(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "LIMIT_BYTES", 1_000)
    with pytest.raises(TransferError, match=r"0\.01 GB.*\n.*--force"):
        two.push({"big": np.zeros(1_000_000)})
    two.run("big = torch.zeros(1000)")
    with pytest.raises(TransferError, match="--force"):
        two.pull("big")
    assert two.pull("big", force=True).shape == (1000,)


def test_values_that_cannot_be_sent_are_refused_with_the_reason(two: Cluster) -> None:
    with pytest.raises(TransferError, match="cannot travel"):
        two.push({"code": lambda: 1})
    with pytest.raises(TransferError, match="NameError"):
        two.pull("never_defined")
    two.run("class Bad:\n    def __reduce__(self): return dict, (1, 2, 3)\nlock = __import__('threading').Lock()")
    for name, words in (
        ("lock", r"lock on rank 1 cannot be sent: its type is lock\.\nTypeError.*\n→ .*%pull str\(lock\) --rank 1"),
        ("[lock, 1]", r"its type is list\.\nTypeError: cannot pickle.*\n→ .*%pull 'str\(\[lock, 1\]\)' --rank 1"),
        ("Bad()", r"Bad\(\) of rank 1 cannot be built in the notebook\.\nTypeError: dict expected"),
    ):
        with pytest.raises(TransferError, match=words):
            two.pull(name, 1)
    with pytest.raises(TransferError, match="not a name"):
        two.push({"a b": 1})
    with pytest.raises(UsageError, match="no rank 7"):
        two.pull("rank", 7)


def test_an_instance_of_a_class_that_ranks_lack_is_refused_with_a_hint(spare: str) -> None:
    shown = run_beside(
        spare,
        "class Config: pass\ntry: cluster.push({'config': Config()})\nexcept Exception as error: print(error)\n",
    )
    assert "%%distributed" in shown


@pytest.mark.long
def test_a_tensor_keeps_its_type_and_bits_from_torch_to_torch() -> None:
    code = (
        "import torch; from nbkit.wire import parcel\n"
        "for name in ('float32', 'float16', 'bfloat16', 'int64', 'bool', 'complex64'):\n"
        "    t = (torch.arange(12).reshape(3, 4) % 2).to(getattr(torch, name)).t()\n"
        "    back = parcel.read(parcel.write(parcel.pack({'t': t, 'twice': t})))['t']\n"
        "    assert back.dtype == t.dtype and torch.equal(back, t), (name, back)\n"
        "    print(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) == 6
