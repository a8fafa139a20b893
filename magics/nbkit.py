"""`%nbkit`: `plan` a training; `why` and `debug` when it is stuck or fails; `report`, `trace` and `export` it."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.cluster.job import AttachedJob
from nbkit.notebook.export.export import export
from nbkit.notebook.planning import planned
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard
from nbkit.notebook.widgets.run_report import Written

from .arguments import HelpShown, nbkit_parser, parse, shown


@magics_class
class NbkitMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magic `%nbkit`, with commands."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def nbkit(self, line: str) -> Any:
        try:
            options = vars(parse(nbkit_parser(), line))
        except HelpShown:
            return None
        command, as_json = options.pop("verb"), options.pop("json", False)
        if command == "plan":
            if as_json and options["model"] is None and options["batch"] is None:
                return shown(current().training.look(), as_json=True)
            return shown(planned(self.shell.user_ns, **options), as_json=as_json)
        if command == "trace":
            return current().trace(**options)
        if command == "why":
            asked = options.pop("job")
            return shown((AttachedJob.attach(asked) if asked else current()).why(**options), as_json=as_json)
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
