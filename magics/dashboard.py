"""`%dashboard`, `%nbkit report` and `%nbkit trace`."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from magics.arguments import HelpShown, dashboard_parser, nbkit_parser, parse
from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.tracing import Traced
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard
from nbkit.notebook.widgets.report import Written


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
