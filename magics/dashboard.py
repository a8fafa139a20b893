"""`%dashboard`: a live view of the training."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.notebook.widgets.dashboard.dashboard import Dashboard

from .arguments import HelpShown, dashboard_parser, parse


@magics_class
class DashboardMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magic `%dashboard`."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def dashboard(self, line: str) -> Any:
        try:
            options = parse(dashboard_parser(), line)
        except HelpShown:
            return None
        return Dashboard(options.run, beside=options.beside, pin=options.pin, steps=options.steps)


DashboardMagics.dashboard.__doc__ = dashboard_parser().format_help()
