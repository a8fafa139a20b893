"""The `nbkit` command. Each module of this package is the subcommand of its name.

Such a module has a docstring (its help), `prepare_parser(parser)` and `run(arguments) -> exit code`.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import nbkit
from nbkit.errors import NbkitError, UsageError
from nbkit.name_clash import REMEDY

if not hasattr(nbkit, "load_ipython_extension"):  # the other project was installed later, and owns nbkit/__init__.py
    sys.exit(f"{nbkit.__file__} belongs to another project named nbkit, not to nbkit-train.\n→ {REMEDY}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns 0, 1 for an error, or 2 for a wrong argument. None takes the command line."""
    for stream in (sys.stdout, sys.stderr):
        _spell_out(stream)
    parsed = prepare_parser(subcommands()).parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except BrokenPipeError:  # as in `nbkit doctor | head`: the reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except NbkitError as error:
        print(f"nbkit: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


def _spell_out(stream: Any) -> None:
    """Write `->` for an arrow, instead of an error, to a terminal or file with only ASCII or another small set."""
    try:
        "".join(_IN_ASCII).encode(stream.encoding)
    except (UnicodeEncodeError, LookupError):
        codecs.register_error("nbkit", _in_ascii)
        stream.reconfigure(errors="nbkit")
    except (AttributeError, TypeError):  # not a text stream, as in tests
        pass


_IN_ASCII = {"→": "->", "✓": "+", "✗": "x", "…": "...", "·": "-", "×": "x", "–": "-", "≈": "~", "—": "-"}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_IN_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


def prepare_parser(modules: Sequence[ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nbkit", description="Run PyTorch training on many ranks from a notebook.")
    parser.add_argument("--version", action="version", version=f"nbkit {nbkit.__version__}")
    # The launcher of deepspeed tells each process of a module its number in this way: see `nbkit run`.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        text = (module.__doc__ or name).strip()  # python -OO has no docstrings
        command = commands.add_parser(name, help=text.splitlines()[0], description=text)
        module.prepare_parser(command)
        command.set_defaults(run=module.run)
    return parser


def subcommands() -> list[ModuleType]:
    """Return the modules of this package, in the order of their names."""
    return [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
