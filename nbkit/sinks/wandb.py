"""A sink for Weights & Biases."""

from __future__ import annotations

from typing import Any

from nbkit.sinks.told import line, numbers, require


class WandB:
    """Logs to a run of Weights & Biases. The options go to `wandb.init`, such as mode="offline" or entity="team".

    Each number of a step is a metric over "step". (After a rewind, steps are repeated, but wandb's own counter can only
    grow.) Other events are lines of text under "event". A switch changes "strategy" in the run's config. Raises
    UsageError if wandb is not installed.
    """

    def __init__(self, project: str = "nbkit", **options: Any) -> None:
        require("wandb")
        self.options = {"project": project, **options}
        self._run: Any = None

    def open(self, run: dict[str, Any]) -> None:
        """Begin a run with the name and the facts of the training."""
        import wandb

        options = {"name": run["name"], **self.options}
        config = {**{name: value for name, value in run.items() if name != "name"}, **options.pop("config", {})}
        self._run = wandb.init(config=config, **options)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, event: dict[str, Any]) -> None:
        """Log an event."""
        text = line(event)
        self._run.log({"step": event["step"], **({"event": text} if text else numbers(event))})
        if event["kind"] == "switch":
            self._run.config.update({"strategy": event["new"]}, allow_val_change=True)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
