"""`%%distributed` and `%%rank`: a cell on the ranks. `%distributed on`: each cell from then on.

Both run as an awaited cell, so that the kernel can answer widgets while the ranks work: a transformer rewrites the cell
before IPython compiles it. Where that is not possible (inside %%time or %%capture, or with autoawait off), the same
cell runs as a plain magic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from nbkit.errors import NbkitError, UsageError
from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.cluster.job import AttachedJob, JobCell

from .arguments import PARSERS, HelpShown, distributed_parser, distribution_parser, parse, rank_parser

ALL_CELLS = "nbkit_all_cells"
"""The attribute of the shell that is True after `%distributed on`. nbkit's part of JupyterLab reads it."""


def rewrite(lines: list[str]) -> list[str]:
    """Return the lines of a cell. If it is for the ranks, they become an awaited call."""
    magic, _, line = (lines[0] if lines else "").strip().partition(" ")
    shell = get_ipython()
    if getattr(shell, ALL_CELLS, False) and _is_for_all(shell, lines):
        cell = "".join(lines)
        if not shell.autoawait:
            return [f"get_ipython().run_cell_magic('distributed', '', {cell!r})\n"]
        return [f"await __import__({__name__!r}, fromlist=['run_on_all']).run_on_all({cell!r})\n"]
    if (
        magic not in ("%%distributed", "%%rank")
        or shell is None
        or not shell.autoawait
        or not _is_outermost(shell, lines)
    ):
        return lines
    body = "".join(lines[1:])
    return [f"await __import__({__name__!r}, fromlist=['run']).run({magic!r}, {line!r}, {body!r})\n"]


def _is_for_all(shell: Any, lines: list[str]) -> bool:
    """Return True if a person has sent this cell, and it does not begin with a magic, a command or a question."""
    code = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    kernel = getattr(shell, "kernel", None)
    sent = kernel.get_parent("shell").get("content", {}) if kernel is not None else {}
    by_person = sent.get("store_history", True) and not sent.get("silent", False)  # not by a front end for itself
    return bool(code and code[0][0] not in "%!?" and code[-1][-1] != "?" and by_person and _is_outermost(shell, lines))


def _is_outermost(shell: Any, lines: list[str]) -> bool:
    """Return True if this is the cell that the user has sent, and not a part that %%time or %%capture runs."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return asyncio._get_running_loop() is None
    sent = kernel.get_parent("shell").get("content", {}).get("code", "")
    return bool("".join(lines).strip() == sent.strip())


async def run(magic: str, line: str, body: str) -> None:
    """Run a cell on the ranks, in the awaited form."""
    try:
        options = _parsed(magic, line)
    except HelpShown:
        return
    if options.job:
        print(given := await asyncio.to_thread(_run_in_job, options, body))
        _finish(options, body, given)
        return
    with _hints_for(magic):
        results = await current().run_async(_with_own_line(magic, line, body), **_run_options(options))
    _finish(options, body, results)


def _run_options(options: Any) -> dict[str, Any]:
    """Return the arguments of `Cluster.run` besides the cell."""
    given = {name: getattr(options, name) for name in ("ranks", "timeout", "at_step", "queue", "tabs")}
    return {**given, "detach": options.detach is not None}


async def run_on_all(cell: str) -> None:
    """Run a cell on every rank, after `%distributed on`."""
    await current().run_async(cell)


def _parsed(magic: str, line: str) -> Any:
    options = parse(PARSERS[magic](), line)
    if options.detach and options.name:
        raise UsageError("A detached cell gives a handle, not Results.", numbers=line, hint=f"--detach {options.name}")
    return options


def _run_in_job(options: Any, body: str) -> JobCell:
    """Run a cell in a program that listens."""
    if options.ranks or options.detach or options.queue or options.tabs:
        raise UsageError(
            "A cell in a program that listens runs on all ranks, and is waited for.",
            hint=f"%%distributed --job {options.job} --timeout 60s",
        )
    seconds = {} if options.timeout is None else {"timeout": options.timeout}
    return AttachedJob.attach(options.job).run(body, **seconds)


@contextmanager
def _hints_for(magic: str) -> Iterator[None]:
    """Let a hint about ranks name `%%rank`, which takes them without an option."""
    try:
        yield
    except NbkitError as error:
        if magic == "%%rank":
            error.hint = error.hint.replace("--ranks", magic)
        raise


def _with_own_line(magic: str, line: str, body: str) -> str:
    """Return the cell with its first line as a comment, so that errors have the line numbers that the user sees."""
    return body if body.lstrip().startswith("%%") else f"# {magic} {line}\n{body}"


def _finish(options: Any, body: str, results: Any) -> None:
    shell = get_ipython()
    if name := options.detach or options.name:
        shell.user_ns[name] = results
    if options.detach:
        results.show()
    if options.here:
        shell.run_cell(body, store_history=False).raise_error()


@magics_class
class CellMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The plain form of the cell magics."""

    @line_magic("distributed")  # type: ignore[misc, untyped-decorator]
    def distribute(self, line: str) -> None:
        """Run each later cell on every rank, or in the notebook again."""
        try:
            wanted = parse(distribution_parser(), line).cells == "on"
        except HelpShown:
            return
        said = "Cells run in this notebook again."
        if wanted:
            ranks = current().entry.n
            said = f"Each cell now runs on all {ranks} ranks, unless it begins with %, ! or ?.   %distributed off"
        setattr(self.shell, ALL_CELLS, wanted)
        print(said)

    @no_var_expand  # type: ignore[misc, untyped-decorator]
    @cell_magic  # type: ignore[misc, untyped-decorator]
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank."""
        self._run("%%distributed", line, cell)

    @no_var_expand  # type: ignore[misc, untyped-decorator]
    @cell_magic  # type: ignore[misc, untyped-decorator]
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks."""
        self._run("%%rank", line, cell)

    def _run(self, magic: str, line: str, cell: str) -> None:
        try:
            options = _parsed(magic, line)
        except HelpShown:
            return
        if options.job:
            print(given := _run_in_job(options, cell))
            _finish(options, cell, given)
            return
        with _hints_for(magic):
            results = current().run(_with_own_line(magic, line, cell), **_run_options(options))
        _finish(options, cell, results)


CellMagics.distribute.__doc__ = distribution_parser().format_help()
CellMagics.distributed.__doc__ = distributed_parser().format_help()
CellMagics.rank.__doc__ = rank_parser().format_help()
