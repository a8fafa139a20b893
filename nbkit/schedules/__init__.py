"""Pipeline schedules: what each rank does with which micro-batch, in which order. Pure arithmetic, no torch.

`Schedule.of("zbv", ranks=4, microbatches=8)` gives the lists of operations that the executor follows and that
`simulate` turns into a planned timeline.
"""

from nbkit.schedules.schedule import NAMES, Kind, Op, Schedule
from nbkit.schedules.simulate import OpTime, ScheduleTimeline, simulate

__all__ = ["NAMES", "Kind", "Op", "OpTime", "Schedule", "ScheduleTimeline", "simulate"]
