"""Test that each private symbol of another library is listed, and a missing one disables only its feature."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_ranks

from nbkit import jupyter_private, private_symbols
from nbkit.rank import torch_private

ROOT = Path(__file__).resolve().parents[1]
CODE = sorted(path for folder in ("nbkit", "magics") for path in (ROOT / folder).rglob("*.py"))
SYMBOLS = [*torch_private.SYMBOLS, *jupyter_private.SYMBOLS]
# Symbols of the standard library, and of packages that are no dependency.
OTHERS = {
    "_SubParsersAction", "_actions", "_current_frames", "_exit", "_fields", "_get_running_loop", "_getframe",
    "_set_running_loop", "_MultiProcessingLauncher", "_attn_implementation", "_is_stateful", "_shared_state",
    "_supports_sdpa", "_tp_plan", "_C",
}  # fmt: skip
WITHOUT = [symbol.path for symbol in torch_private.SYMBOLS if not symbol.at_use and symbol.path in {
    "torch:_foreach_copy_", "torch:_foreach_mul_", "torch:_foreach_norm", "torch:_assert_async", "torch:_safe_softmax",
    "torch._C:_current_graph_task_id", "torch._C:_disabled_torch_function_impl",
    "torch._C:DisableTorchFunctionSubclass", "torch._C:_len_torch_function_stack",
    "torch.ops:aten._unsafe_view.default", "torch.nn:Module._call_impl",
    "torch.nn.modules.batchnorm:_BatchNorm", "torch.nn.modules.batchnorm:_NormBase", "torch.nn.modules.conv:_ConvNd",
    "torch.nn.modules.dropout:_DropoutNd", "torch.nn.functional:_canonical_mask",
    "torch._subclasses.fake_tensor:FakeTensorMode", "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "torch.distributed.distributed_c10d:_new_process_group_helper",
}]  # fmt: skip


def names_defined(trees: list[ast.AST]) -> set[str]:
    """Return the names that nbkit's own code gives to functions, classes, variables and attributes of `self`."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in ("self", "cls") else set()
    return found


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each attribute, each imported name, and each name given to getattr or setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("nbkit"):
            yield from ((node.lineno, name) for name in (*node.module.split("."), *(one.name for one in node.names)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.lineno, str(node.args[1].value)


def test_every_private_name_of_another_library_is_listed() -> None:
    trees = {path: ast.parse(path.read_text()) for path in CODE}
    listed = {symbol.name for symbol in SYMBOLS} | OTHERS | names_defined(list(trees.values()))
    unlisted = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in private_names(tree)
        if name.startswith("_") and not name.startswith("__") and name not in listed
    ]

    assert unlisted == []


def test_the_installed_libraries_have_all_listed_symbols() -> None:
    assert private_symbols.problems(SYMBOLS) == []


def test_a_missing_or_changed_symbol_is_described_in_a_sentence() -> None:
    missing = private_symbols.Symbol("json:_dumps", "write records", "none are written")
    changed = private_symbols.Symbol("json:dumps", "write records", "none are written", parameters=("obj", "colour"))
    known = private_symbols.Symbol("json:dumps", "write records", "none are written", parameters=("obj",))

    assert missing.problem() == "json  has no json._dumps. nbkit uses it to write records; none are written."
    assert changed.problem().startswith("json  has another json.dumps (it takes no colour). nbkit uses it to")
    assert known.problem() == ""
    with pytest.raises(private_symbols.ClusterError, match=r"has no json\._dumps"):
        private_symbols.Missing(missing)("{}")


def place_of(rank: int, port: int) -> dict[str, str]:
    """Return the environment of one of two ranks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def losses_without(paths: list[str]) -> list[float]:
    """Return the losses of two ranks that train under five strategies on a torch without these symbols."""
    port, ranks = free_port(), []
    for rank in range(2):
        environment = {**os.environ, **place_of(rank, port), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.support.training_without", *paths]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    losses: list[float] = json.loads(outputs[0].splitlines()[-1])
    return losses


def losses_with_all(rank: int, port: int) -> list[float]:
    os.environ |= place_of(rank, port)
    sys.argv = [""]
    from tests.support.training_without import STRATEGIES, losses

    return losses(STRATEGIES)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_training_on_a_torch_without_private_symbols_has_the_same_losses() -> None:
    assert len(WITHOUT) == 19
    (with_all, _) = run_ranks(losses_with_all, 2, free_port(), join=False, timeout=180)
    assert len(with_all) == 10 and losses_without(WITHOUT) == pytest.approx(with_all, rel=1e-5)


CELLS = """
import sys
from nbkit import Cluster
cluster = Cluster.start(2, name=sys.argv[1])
try:
    print(cluster.notes)
    for source in ("1 / (1 - rank); dist.barrier()", "one = torch.ones(1); dist.all_reduce(one); int(one)"):
        try:
            print(cluster.run(source).values)
        except Exception as error:
            print(type(error).__name__)
finally:
    cluster.stop()
"""
SITE = """
import sys
sys.path.insert(0, {root!r})
sys.argv = getattr(sys, "argv", [""])
from nbkit import private_symbols
resolve = private_symbols.Symbol.resolve
def lacking(symbol):
    if symbol.name == "_new_process_group_helper":
        raise AttributeError(symbol.path)
    return resolve(symbol)
private_symbols.Symbol.resolve = lacking
"""


@pytest.mark.long
def test_a_cluster_whose_torch_lacks_the_group_helper_runs_cells_after_an_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE.format(root=str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    done = subprocess.run(
        [sys.executable, "-c", CELLS, f"plain{os.getpid()}"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "has no torch.distributed.distributed_c10d._new_process_group_helper" in lines[0]
    assert "CellError" in lines
    assert "{0: 2, 1: 2}" in lines
