"""`%nbkit`: `plan` a training; `why` and `debug` when it is stuck or fails; `report`, `trace` and `export` it."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.cluster.why import Why
from nbkit.notebook.export.export import Exported, export
from nbkit.notebook.planning import planned
from nbkit.notebook.tracing import TraceFile
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard
from nbkit.notebook.widgets.run_report import Written
from nbkit.planner.choose.search import Plan, Words

from .arguments import HelpShown, nbkit_parser, parse


@magics_class
class NbkitMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magic `%nbkit`, with commands."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def nbkit(self, line: str) -> Written | TraceFile | Exported | Plan | Words | Why | None:
        try:
            options = vars(parse(nbkit_parser(), line))
        except HelpShown:
            return None
        command = options.pop("command")
        if command == "plan":
            return planned(self.shell.user_ns, **options)
        if command == "trace":
            return current().trace(**options)
        if command == "why":
            return current().why(**options)
        if command == "debug":
            current().debug(**options)
            return None
        if command == "export":
            return export(**options)
        board = Dashboard(options["run"])
        try:
            return Written(board.report(options["path"]))
        finally:
            board.close()


NbkitMagics.nbkit.__doc__ = nbkit_parser().format_help()
