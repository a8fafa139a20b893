"""A sink for MLflow."""

from __future__ import annotations

import time
from typing import Any

from nbkit.sinks.told import line, numbers, require


class MLflow:
    """Logs to a run of MLflow. tracking_uri: as for MLflow; None: MLFLOW_TRACKING_URI, or MLflow's default.

    Each number of a step is a metric at that step. Any other event is a tag with the text of the event. The name of
    the tag has a number and the step: "event 00001 step 500". Raises UsageError if mlflow is not installed.
    """

    def __init__(self, experiment: str = "nbkit", *, tracking_uri: str | None = None) -> None:
        require("mlflow")
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._num_events = 0

    def open(self, run: dict[str, Any]) -> None:
        """Begin a run with the name and the facts of the training."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        home = client.create_experiment(self.experiment) if found is None else found.experiment_id
        self._id = client.create_run(home, run_name=run["name"]).info.run_id
        for name in ("strategy", "world_size", "parameters", "run_dir"):
            client.log_param(self._id, name, run[name])
        self._client = client

    def write(self, event: dict[str, Any]) -> None:
        """Log an event."""
        from mlflow.entities import Metric

        if text := line(event):
            self._num_events += 1
            self._client.set_tag(self._id, f"event {self._num_events:05} step {event['step']}", text)
            return
        now = int(time.time() * 1e3)
        made = [Metric(name, value, now, event["step"]) for name, value in numbers(event).items()]
        self._client.log_batch(self._id, metrics=made)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
