"""`%dashboard`, `%nbkit report` and `%nbkit trace`."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from magics.arguments import HelpShown, MagicParser, parse
from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.tracing import Traced
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard
from nbkit.notebook.widgets.report import Written


def dashboard_parser() -> MagicParser:
    parser = MagicParser(prog="%dashboard", description="Show what the training does, live: loss, steps, traffic.")
    parser.add_argument("run", nargs="?", help="a recorded run's directory (the cluster's newest training)")
    return parser


def nbkit_parser() -> MagicParser:
    parser = MagicParser(prog="%nbkit", description="What nbkit can do with a training beside showing it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="write one self-contained page with every chart")
    report.add_argument("path", nargs="?", default="run.html", help="where to (run.html)")
    report.add_argument("--run", help="a recorded run's directory (the cluster's newest training)")
    trace = commands.add_parser("trace", help="the next steps of all ranks as one file for Perfetto")
    trace.add_argument("steps", nargs="?", type=int, default=3, help="how many (3)")
    trace.add_argument("path", nargs="?", help="where to (trace-RUN-FIRST-LAST.json.gz)")
    return parser


@magics_class
class DashboardMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """Two line magics."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def dashboard(self, line: str) -> Any:
        try:
            options = parse(dashboard_parser(), line)
        except HelpShown:
            return None
        return Dashboard(options.run)

    @line_magic  # type: ignore[misc, untyped-decorator]
    def nbkit(self, line: str) -> Written | Traced | None:
        try:
            options = parse(nbkit_parser(), line)
        except HelpShown:
            return None
        if options.command == "trace":
            return current().trace(options.steps, options.path)
        board = Dashboard(options.run)
        try:
            return Written(board.report(options.path))
        finally:
            board.close()


DashboardMagics.dashboard.__doc__ = dashboard_parser().format_help()
DashboardMagics.nbkit.__doc__ = nbkit_parser().format_help()
