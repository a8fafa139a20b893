"""Run any torch.distributed program so that nbkit can examine it, for example with `nbkit why --job NAME`."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import nbkit
from nbkit.errors import UsageError
from nbkit.quoting import shell_words, user_path
from nbkit.wire.import_changes import change_when_imported


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        type=int,
        metavar="N",
        help="start N ranks on this host with torchrun; default: one rank, without torchrun",
    )
    parser.add_argument("--job", metavar="NAME", help="name of the job; default: the program's name and four letters")
    parser.add_argument("--no-cells", action="store_true", help="run no live cells: nbkit can only examine the program")
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module, as in python -m")
    parser.add_argument("program", metavar="PROGRAM", help="the script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")
    parser.epilog = (
        "With a launcher, type torchrun --nproc-per-node 4 -m nbkit run train.py, or srun nbkit run train.py. "
        "You can also type nbkit run torchrun --nproc-per-node 4 train.py"
    )


def run(arguments: argparse.Namespace) -> int:
    options = [
        *["--job", arguments.job or ""] * (arguments.job is not None),
        *["--no-cells"] * arguments.no_cells,
        *["-m"] * arguments.module,
    ]
    if arguments.n is not None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.n)]
        command = [sys.executable, *torchrun, "-m", "nbkit", "run", *options, arguments.program, *arguments.args]
        os.execv(sys.executable, command)
    script = user_path(arguments.program)
    launching = None if arguments.module else _launching(arguments.program, arguments.args, options)
    if launching is not None and (found := shutil.which(arguments.program)) is not None:
        os.execv(found, launching)
    if not arguments.module and not script.is_file():
        raise UsageError(
            "There is no such program.", numbers=str(script), hint=shell_words("nbkit", "run", "train.py", "--args")
        )
    local_rank = getattr(arguments, "local_rank", None)
    told = [] if local_rank is None else [f"--local_rank={local_rank}"]
    sys.argv = [arguments.program, *told, *arguments.args]
    # Not before the program imports torch: it may set variables that torch reads, such as OMP_NUM_THREADS.
    change_when_imported({"torch": lambda _: nbkit.listen(arguments.job, cells=not arguments.no_cells)})
    if arguments.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments.program, run_name="__main__", alter_sys=True)
    else:
        _run_script(script)
    return 0


_STARTS_ANYTHING = ("srun", "mpirun", "mpiexec")
_AS_MODULE = {**dict.fromkeys(("torchrun", "accelerate", *_STARTS_ANYTHING), "-m"), "deepspeed": "--module"}
"""Launchers -> their option, or that of the Python they start, which runs a module instead of a script."""


def _launching(launcher: str, words: Sequence[str], options: Sequence[str]) -> list[str] | None:
    """Return a launcher's command with `nbkit run` before the script in `words`; None if either is not known."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py") and user_path(word).is_file()), None)
    if Path(launcher).name not in _AS_MODULE or at is None:
        return None
    before = list(words[:at])
    names = [Path(word).name for word in (launcher, *before)]
    innermost = [name for name in names if name in _AS_MODULE][-1]  # as in srun torchrun train.py
    as_module = _AS_MODULE[innermost]
    if innermost in _STARTS_ANYTHING and not any(name.startswith("python") for name in names):
        before.append(sys.executable)  # the script is started as a program of its own
    return [launcher, *before, as_module, "nbkit", "run", *options, *words[at:]]


def _run_script(script: Path) -> None:
    """Run a script as `python script` does. It is the module __main__ until the process ends."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(script), __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    sys.path[0 : 0 if sys.flags.safe_path else 1] = [str(script.resolve().parent)]
    exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)
