"""Pipeline schedules: the operations of each rank on each micro-batch, in order. This package does not need torch.

`Schedule.of("zbv", ranks=4, microbatches=8)` returns the lists of operations that the executor follows. `simulate`
makes a timeline from them. `register("mine", build)` adds a schedule of your own.
"""

from nbkit.schedules.builtin import BUILT_IN
from nbkit.schedules.schedule import (
    Kind,
    Op,
    Schedule,
    ScheduleType,
    add,
    checked_sizes,
    names,
    register,
    registered,
    type_of,
)
from nbkit.schedules.simulate import OpTime, ScheduleTimeline, simulate

__all__ = [
    "BUILT_IN",
    "Kind",
    "Op",
    "OpTime",
    "Schedule",
    "ScheduleTimeline",
    "ScheduleType",
    "add",
    "checked_sizes",
    "names",
    "register",
    "registered",
    "simulate",
    "type_of",
]
