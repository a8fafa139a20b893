"""Push and pull between a process without torch and ranks with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nbkit import Cluster
from nbkit.errors import TransferError, UsageError
from nbkit.wire import parcel


def test_what_is_pushed_arrives_on_every_rank(two: Cluster) -> None:
    two.push({"lr": 0.1, "names": ["a", "b"], "table": {"x": (1, 2)}})
    assert two.run("lr, names, table").values == {r: (0.1, ["a", "b"], {"x": (1, 2)}) for r in range(2)}


def test_an_array_arrives_writable_and_private_to_each_rank(two: Cluster) -> None:
    two.push({"array": np.arange(6, dtype=np.float32).reshape(2, 3)})
    two.run("array += rank")
    assert np.array_equal(two.pull("array", 0), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert np.array_equal(two.pull("array", 1), np.arange(6, dtype=np.float32).reshape(2, 3) + 1)


def test_a_tensor_comes_back_as_an_array_where_torch_is_not_imported(nbkit_home: Path) -> None:
    code = (
        "import sys; from nbkit import Cluster\n"
        "cluster = Cluster.start(2, cpu=True)\n"
        'value = cluster.pull(\'{"w": torch.arange(3.0), "h": torch.ones(2, dtype=torch.bfloat16)}\', 1)\n'
        "print(type(value['w']).__name__, value['w'].tolist(), value['h'].tolist(), 'torch' in sys.modules)\n"
        "cluster.stop()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "ndarray [0.0, 1.0, 2.0] [1.0, 1.0] False"


def test_several_ranks_give_a_list(two: Cluster) -> None:
    two.run("mine = rank * 2")
    assert two.pull("mine", None) == [0, 2]
    assert two.pull("mine", [1]) == [2]


def test_what_is_not_on_a_rank_is_named_as_it_was_typed(two: Cluster) -> None:
    with pytest.raises(TransferError, match=r"'nothing' has no value on rank 1\.\nNameError.*\n→ %%rank 1"):
        two.pull("nothing", 1)


def test_nothing_stays_in_shared_memory(two: Cluster) -> None:
    before = set(parcel.folder().glob("nbkit-*"))
    two.push({"big": np.zeros(1_000_000)})
    two.pull("big", None)
    assert set(parcel.folder().glob("nbkit-*")) <= before


def test_what_is_too_large_is_refused_with_its_size(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "LIMIT_BYTES", 1_000)
    with pytest.raises(TransferError, match=r"0\.01 GB.*\n.*--force"):
        two.push({"big": np.zeros(1_000_000)})
    two.run("big = torch.zeros(1000)")
    with pytest.raises(TransferError, match="--force"):
        two.pull("big")
    assert two.pull("big", force=True).shape == (1000,)


def test_what_cannot_travel_says_why(two: Cluster) -> None:
    with pytest.raises(TransferError, match="cannot travel"):
        two.push({"code": lambda: 1})
    with pytest.raises(TransferError, match="NameError"):
        two.pull("never_defined")
    with pytest.raises(TransferError, match="not a name"):
        two.push({"a b": 1})
    with pytest.raises(UsageError, match="no rank 7"):
        two.pull("rank", 7)


def test_an_instance_of_a_class_that_the_ranks_do_not_know_names_the_way_round(nbkit_home: Path) -> None:
    code = (
        "from nbkit import Cluster\nclass Config: pass\n"
        "cluster = Cluster.start(1, cpu=True)\n"
        "try: cluster.push({'config': Config()})\n"
        "except Exception as error: print(error)\n"
        "cluster.stop()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "%%distributed" in shown.stdout


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool", "complex64"])
def test_a_tensor_keeps_its_type_and_bits_from_torch_to_torch(dtype: str, tmp_path: Path) -> None:
    code = (
        "import torch; from nbkit.wire import parcel\n"
        f"t = (torch.arange(12).reshape(3, 4) % 2).to(torch.{dtype}).t()\n"
        "back = parcel.read(parcel.write(parcel.pack({'t': t, 'twice': t})))['t']\n"
        "assert back.dtype == t.dtype and torch.equal(back, t), back\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
