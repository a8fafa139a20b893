"""A sink for Trackio."""

from __future__ import annotations

from typing import Any

from nbkit.sinks.told import line, numbers, require


class Trackio:
    """Logs to a run of Trackio. The options go to `trackio.init`, such as space_id="team/space".

    Each number of a step is a metric at that step. Other events are lines of text under "event". To see them, type
    `trackio show --project nbkit` in a terminal. Raises UsageError if trackio is not installed.
    """

    def __init__(self, project: str = "nbkit", **options: Any) -> None:
        require("trackio")
        # A rank has no page in which a dashboard could be shown.
        self.options = {"project": project, "embed": False, **options}
        self._run: Any = None

    def open(self, run: dict[str, Any]) -> None:
        """Begin a run with the name and the facts of the training."""
        import trackio

        options = {"name": run["name"], **self.options}
        config = {**{name: value for name, value in run.items() if name != "name"}, **options.pop("config", {})}
        self._run = trackio.init(config=config, **options)

    def write(self, event: dict[str, Any]) -> None:
        """Log an event."""
        text = line(event)
        self._run.log({"event": text} if text else numbers(event), step=event["step"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()
