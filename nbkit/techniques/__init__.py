"""The keys and the axes of a strategy: what each of them means, what it goes with, and what it costs.

A key has two halves. Its file here is the pure half: standard library only, so that the notebook can read it too. The
torch half is a function that ranks import when they build the data axis; `Key.engine` names it. A new key of nbkit is
these two files, and a line in the list below. `register` adds a key of your own, and a package offers one by an entry
point in the group `nbkit.techniques`. The axes are in axes.py; `zero=` and `shard=` are in nbkit/strategy.py.
"""

from nbkit.techniques.axes import DEGREES, Axis, refuse_axes
from nbkit.techniques.bucket import BucketKey
from nbkit.techniques.compress import CompressKey
from nbkit.techniques.ep import ExpertsKey
from nbkit.techniques.exchange import GradientExchange
from nbkit.techniques.experts import MovedExpertsKey
from nbkit.techniques.key import AnyStrategy, GradientKey, Key, whole_number
from nbkit.techniques.microbatches import MicrobatchesKey
from nbkit.techniques.mine import Judgement, MineKey, class_in, in_full, judge_schedule, use
from nbkit.techniques.order import OrderKey
from nbkit.techniques.places import PlacesKey
from nbkit.techniques.registry import (
    RESERVED,
    Settings,
    add,
    engine_of,
    exchange_of,
    is_key,
    key_of,
    keys,
    names,
    parsed,
    register,
    registered,
    spelled,
)
from nbkit.techniques.schedule import ScheduleKey
from nbkit.techniques.speeds import SpeedsKey
from nbkit.techniques.sync_every import SyncEveryKey
from nbkit.techniques.tp_chunks import TpChunksKey, chunks_of

for _key in (  # in the order in which a strategy is spelled
    ExpertsKey(),
    MovedExpertsKey(),
    ScheduleKey(),
    MicrobatchesKey(),
    OrderKey(),
    PlacesKey(),
    SpeedsKey(),
    BucketKey(),
    CompressKey(),
    SyncEveryKey(),
    TpChunksKey(),
    MineKey(),
):
    add(_key, built_in=True)

__all__ = [
    "DEGREES",
    "RESERVED",
    "AnyStrategy",
    "Axis",
    "GradientExchange",
    "GradientKey",
    "Judgement",
    "Key",
    "Settings",
    "add",
    "chunks_of",
    "class_in",
    "engine_of",
    "exchange_of",
    "in_full",
    "is_key",
    "judge_schedule",
    "key_of",
    "keys",
    "names",
    "parsed",
    "refuse_axes",
    "register",
    "registered",
    "spelled",
    "use",
    "whole_number",
]
