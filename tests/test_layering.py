"""Test that notebook code and rank code do not import each other, with a linter and in real processes.

Both are needed: importing a submodule runs the package's `__init__`, which the linter does not see.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JUPYTER = ("IPython", "ipykernel", "ipyparallel", "ipywidgets", "jupyter_client", "jupyter_core", "zmq", "traitlets")
TORCH = ("torch", "nbkit.rank", "nbkit.bridge")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", folder / "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def modules(folder: str) -> list[str]:
    """Return every importable module below a folder of the checkout, without `__main__`, which runs when imported."""
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def first_to_load(names: list[str], forbidden: tuple[str, ...]) -> str:
    """Import `names` in order in a fresh process; return "who: what" for the first forbidden module, else ""."""
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    loaded = [found for found in {forbidden!r} if found in sys.modules]
    if loaded:
        sys.exit(f"{{name}}: {{', '.join(loaded)}}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=120)
    return done.stderr.strip() if done.returncode else ""


def test_imports_follow_the_layers() -> None:
    done = lint(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


INTRUDERS = {
    "nbkit/notebook/intruder.py": ["import torch", "from nbkit.rank import train"],
    "nbkit/notebook/cluster/intruder.py": ["from nbkit.notebook.widgets import training_card"],
    "nbkit/rank/intruder.py": ["import ipyparallel", "from nbkit.notebook import cluster"],
    "nbkit/errors.py": ["import nbkit.rank"],
}


def test_the_linter_finds_imports_against_the_layers(tmp_path: Path) -> None:
    for package in ("nbkit", "magics"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, lines in INTRUDERS.items():
        with (tmp_path / module).open("a") as file:
            file.write("".join(f"\n{line}\n" for line in lines))

    done = lint(tmp_path)

    assert done.returncode == 1
    said = " ".join(done.stdout.split())  # the linter wraps its lines
    for module, lines in INTRUDERS.items():
        name = module.removesuffix(".py").replace("/", ".")
        for line in lines:
            there = line.split()[1]  # or a module below it
            assert re.search(rf"- {name} -> {there}\b", said), (line, done.stdout)


def test_every_top_level_module_is_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    placed = {name.strip("() ") for layer in layers for name in layer.replace(":", "|").split("|")}

    there = {name for name in modules("nbkit") if name.count(".") == 1}

    assert there <= placed, f"not in pyproject.toml's layers: {', '.join(sorted(there - placed))}"


def test_rank_modules_do_not_load_jupyter() -> None:
    # This one needs Triton, which a CPU build of torch does not have.
    every = [name for name in modules("nbkit/rank") if name != "nbkit.rank.rng.mask_kernel"]

    assert first_to_load(every, JUPYTER) == ""


def test_notebook_modules_do_not_load_torch() -> None:
    wing = [name for name in modules("nbkit") if not name.startswith(("nbkit.rank", "nbkit.bridge"))]

    assert first_to_load([*wing, *modules("magics")], TORCH) == ""


def test_import_nbkit_loads_neither_notebook_nor_rank_code() -> None:
    assert first_to_load(["nbkit"], ("nbkit.rank", "nbkit.notebook", "nbkit.bridge", "magics", *JUPYTER, *TORCH)) == ""


def test_loading_the_extension_twice_in_a_real_shell_does_not_load_torch(tmp_path: Path) -> None:
    code = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for line in ("%load_ext nbkit", "%load_ext nbkit", "%load_ext magics"):
    shell.run_cell(line).raise_error()
if loaded := [name for name in ("torch", "nbkit.rank") if name in sys.modules]:
    sys.exit(f"loaded: {loaded}")
"""
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr
