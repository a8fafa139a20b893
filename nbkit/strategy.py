"""A strategy, as the user writes it: how a job is spread over the ranks.

The spelling is the same everywhere (magic, panel, Python, logs): an optional preset, then key=value, separated by
spaces.

    ddp, zero1, zero2, zero3 (fsdp), hsdp    the data axis takes the world
    tp, pp                                   that axis takes the world
    dp= tp= pp= cp=                          degrees; what is left of the world goes to the preset's axis, else to dp
    zero= shard=                             what the data axis shards (0-3), and the ranks of a sharding group
    any other key=                           one file in nbkit/techniques/ says what it means
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

from nbkit import schedules, techniques
from nbkit.device_speeds import of_replicas, rows_by_speed
from nbkit.errors import StrategyError
from nbkit.mesh import AXES, Mesh, with_slowest
from nbkit.schedules import names as every_schedule
from nbkit.techniques import DEGREES, RESERVED, GradientExchange, Key, Settings, refuse_axes, whole_number
from nbkit.techniques.experts import Moved
from nbkit.tensor_layout import bounds

PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp")
_ZERO = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


@dataclass(frozen=True)
class Strategy:
    """A strategy that can be run. Equal values train alike: a setting without effect gets its neutral value.

    dp, tp, pp, cp: degrees of the mesh. zero: what the data axis shards: 0 nothing, 1 optimizer state, 2 also
    gradients, 3 also parameters. shard: ranks of a sharding group within dp; all of dp (also written 0) unless hsdp.
    ep, experts, schedule, microbatches, speeds, order, places: see the key of that name in nbkit/techniques/. settings:
    the values of all other keys that change something. slowest: the axis of the mesh that is chosen to cross nodes if
    `order` is not given; it is not part of the spelling.
    `without_effect` names each given setting that changes nothing. `str()` is the canonical form: the degrees that are
    not 1, in the order dp tp pp cp ("dp=1" if all are 1), then zero and shard, then the other keys in the order of
    nbkit/techniques/__init__.py.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    shard: int = 0
    schedule: str | None = None
    microbatches: int | None = None
    ep: int = field(default=1, kw_only=True)
    experts: Moved = field(default=(), kw_only=True)
    speeds: tuple[int, ...] = field(default=(), kw_only=True)
    order: str = field(default="", kw_only=True)
    slowest: str = field(default="", kw_only=True)
    places: tuple[int, ...] = field(default=(), kw_only=True)
    settings: Mapping[str, Any] = field(default=Settings(), kw_only=True)
    without_effect: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Set settings without effect to neutral values. Raises StrategyError for an invalid value."""
        if wrong := [f"{axis}={self.degree(axis)}" for axis in DEGREES if self.degree(axis) < 1]:
            raise StrategyError("Each degree must be at least 1.", numbers=", ".join(wrong), hint="ddp")
        if self.zero not in range(4):
            raise StrategyError(
                "This ZeRO stage does not exist.",
                numbers=f"zero={self.zero}; 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters",
                hint="zero=3",
            )
        refuse_axes(tuple((axis, self.degree(axis)) for axis in DEGREES))
        if self.slowest:
            self._settle_slowest()
        notes = [*self._settle_data_axis(), *self._settle_keys()]
        object.__setattr__(self, "without_effect", tuple(notes))

    def _settle_data_axis(self) -> Iterator[str]:
        zero, shard = self.zero, self.shard or self.dp
        if self.zero and self.dp == 1:
            yield f"zero={zero} has no effect with dp=1: there is no other rank to shard over"
            zero = 0
        elif self.shard and not self.zero and self.shard != self.dp:
            yield f"shard={shard} has no effect with zero=0: nothing is sharded"
        elif shard < 1 or self.dp % shard:
            raise StrategyError(
                "dp is not a multiple of shard.",
                numbers=f"dp {self.dp} / shard {shard} = {self.dp / shard:.3g} groups",
                hint="shard=" + " or ".join(str(n) for n in divisors(self.dp) if n > 1),
            )
        elif zero and shard == 1:
            yield f"zero={zero} has no effect with shard=1: a group of one rank holds everything"
            zero = 0
        object.__setattr__(self, "zero", zero)
        object.__setattr__(self, "shard", shard if zero else self.dp)

    def _settle_keys(self) -> Iterator[str]:
        given = self.settings
        object.__setattr__(self, "settings", Settings.of(given))
        for name in given:
            if name not in self.settings:
                key = techniques.key_of(name)
                yield f"{key.word(given[name])} has no effect because {key.same}"
        for key in techniques.keys():
            if not key.is_field and key.name not in self.settings:
                continue
            value = getattr(self, key.name) if key.is_field else self.settings[key.name]
            if value != key.neutral:
                key.refuse(value, self)
                if why := key.no_effect(value, self):
                    yield f"{key.word(value)} has no effect {why}"
                    value = key.neutral
            self._set(key, key.settle(value, self))
        if self.order:
            object.__setattr__(self, "slowest", "")

    def _set(self, key: Key, value: Any) -> None:
        if not key.is_field and value != self.settings[key.name]:
            object.__setattr__(self, "settings", Settings.of({**self.settings, key.name: value}))
        elif key.is_field and value != getattr(self, key.name):
            object.__setattr__(self, key.name, value)
            self.__dict__.pop("mesh", None)

    def _settle_slowest(self) -> None:
        if self.slowest not in AXES:
            raise StrategyError(f"{self.slowest!r} is not an axis.", numbers=f"axes: {' '.join(AXES)}", hint="dp")
        if self.slowest not in [axis for axis in AXES if self.degree(axis) > 1][1:]:
            object.__setattr__(self, "slowest", "")

    @classmethod
    def parse(cls, text: str | Strategy, world_size: int, *, node: int | None = None) -> Strategy:
        """Return the strategy that `text` means on `world_size` ranks.

        node: ranks of a node, if there are several nodes. A plain hsdp then shards, and a plain tp splits, within a
        node. Raises StrategyError for an unknown word, for an invalid value, and if the degrees do not multiply to the
        world.
        """
        if isinstance(text, Strategy):
            _check_world({axis: text.degree(axis) for axis in DEGREES}, world_size, absorber=None)
            return text
        preset, words = _read(text)
        given = {key: _number(key, words[key]) for key in RESERVED if key in words}
        degrees = {axis: given[axis] for axis in DEGREES if axis in given}
        absorber: str | None = preset if preset in ("tp", "pp") and preset not in given else "dp"
        if absorber in degrees:
            absorber = None
        _check_world(degrees, world_size, absorber=absorber)
        if absorber is not None:
            degrees[absorber] = world_size // prod(degrees.values())
        if absorber == "tp" and node is not None and "dp" not in degrees:
            left, within = degrees["tp"], _neighbours(degrees) // degrees["tp"]
            # If no divisor of it fits in a node, tp stays as asked for.
            degrees["tp"] = max((n for n in divisors(left)[1:] if node % (n * within) == 0), default=left)
            degrees["dp"] = left // degrees["tp"]
        zero, dp = _stage(preset, given.get("zero")), degrees.get("dp", 1)
        shard = given.get("shard", 0)
        if preset == "hsdp" and dp > 1:
            neighbours = None if node is None else node // _neighbours(degrees)
            shard = _hybrid_shard(dp, shard, neighbours)
        values = {key.name: techniques.parsed(key, words[key.name]) for key in techniques.keys() if key.name in words}
        fields: dict[str, Any] = dict(degrees)
        fields |= {key.name: values.pop(key.name) for key in techniques.keys() if key.is_field and key.name in values}
        return cls(**fields, zero=zero, shard=shard, settings=values)

    @classmethod
    def every(
        cls, world_size: int, *, schedules: Sequence[str] | None = None, cp: bool = True, experts: bool = False
    ) -> list[Strategy]:
        """Return every strategy worth offering on `world_size` ranks, with default micro-batches, simple ones first.

        They cover each split of the world over the axes, each ZeRO stage, hsdp with each group size (parameters
        sharded) and each of `schedules` (default: all). Context parallelism is for sequences that are too long
        otherwise. It comes last, or not at all with cp=False. experts: the model is a mixture of experts, which ep can
        spread, beside the data axis whole and sharded.
        """
        found, names = [], schedules or every_schedule()
        for dp, tp, pp in product(divisors(world_size), repeat=3):
            if world_size % (dp * tp * pp) or (not cp and dp * tp * pp != world_size):
                continue
            groups = [(0, dp)] if dp == 1 else [(0, dp), (1, dp), (2, dp), *((3, n) for n in divisors(dp)[:0:-1])]
            for (zero, shard), schedule in product(groups, names if pp > 1 else (None,)):
                found.append(cls(dp, tp, pp, world_size // (dp * tp * pp), zero, shard, schedule))
        spread = divisors(world_size)[1:] if experts else []
        found += [cls(world_size, zero=zero, ep=ep) for ep in spread for zero in (0, 3)]
        return sorted(found, key=_simplicity)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        found: int = getattr(self, axis)
        return found

    @cached_property
    def exchange(self) -> GradientExchange:
        """Return how the gradients of the data axis are exchanged, as far as keys of the strategy say so."""
        return techniques.exchange_of(self)

    @property
    def deviations(self) -> list[tuple[str, str]]:
        """Return how a training differs from that of one process, and by how much, for each key that changes it."""
        found = [techniques.key_of(name).deviation(value) for name, value in self.settings.items()]
        return [deviation for deviation in found if deviation is not None]

    @cached_property  # a step needs it a dozen times
    def mesh(self) -> Mesh:
        """Return the grid of ranks."""
        return _mesh(tuple(self.degree(axis) for axis in AXES), self.order or self.slowest, self.places)

    @property
    def composed(self) -> Strategy:
        """Return the same techniques with ranks and experts in the usual order. Where they stand changes no step."""
        if not self.speeds:
            return replace(self, order="", slowest="", places=(), experts=())
        at = [self.mesh.index(rank) for rank in range(self.mesh.size)]
        usual = sorted(range(self.mesh.size), key=lambda rank: [at[rank][axis] for axis in AXES])
        speeds = tuple(self.speeds[rank] for rank in usual)
        return replace(self, order="", slowest="", places=(), speeds=speeds, experts=())

    @property
    def summed_axis(self) -> str:
        """Return the axis of the gradient all-reduce: "dp" (whole), "replicate" (shards), or "" if there is none."""
        if self.dp == 1 or not self.exchange.is_sum:
            return ""
        return "dp" if self.zero == 0 else "replicate" if self.shard < self.dp else ""

    def summed_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over which the gradients of `rank` are all-reduced; only `rank` if there is no such axis."""
        line, step = self.mesh.ranks("dp", rank), self.shard if self.summed_axis == "replicate" else 1
        return line[line.index(rank) % step :: step] if self.summed_axis else (rank,)

    @property
    def replica_speeds(self) -> tuple[Fraction, ...]:
        """Return the relative speed of each place along dp; () if all are equal."""
        found = of_replicas(self.speeds, self.mesh) if self.speeds else ()
        return found if len(set(found)) > 1 else ()

    def rows(self, total: int) -> Sequence[tuple[int, int]]:
        """Return (first row, one past the last row) of each place along dp, for a global batch of `total` rows."""
        if speeds := self.replica_speeds:
            return rows_by_speed(total, speeds)
        return [bounds(total, self.dp, index) for index in range(self.dp)]

    @property
    def label(self) -> str:
        """Return a short name for people: "ddp", "zero3", "hsdp", "tp", "ddp+tp+pp". It has no degrees."""
        data = "hsdp" if self.shard < self.dp else f"zero{self.zero}" if self.zero else "ddp"
        names = [
            data if self.dp > 1 else "",
            "ep" if self.ep > 1 else "",
            *(axis for axis in DEGREES if axis != "dp" and self.degree(axis) > 1),
        ]
        return "+".join(name for name in names if name) or "ddp"

    def __str__(self) -> str:
        words = [f"{axis}={self.degree(axis)}" for axis in DEGREES if self.degree(axis) > 1] or ["dp=1"]
        words += [f"zero={self.zero}"] * bool(self.zero) + [f"shard={self.shard}"] * (self.shard != self.dp)
        for key in techniques.keys():
            value = getattr(self, key.name) if key.is_field else self.settings.get(key.name, key.neutral)
            if value != key.neutral:  # the text of a neutral value is not asked for
                words.append(key.word(value))
        return " ".join(words)


@lru_cache(maxsize=256)  # equal strategies share it
def _mesh(degrees: tuple[int, ...], slowest: str, places: tuple[int, ...]) -> Mesh:
    return Mesh(**dict(zip(AXES, degrees, strict=True)), order=with_slowest(slowest), places=places)


def _neighbours(degrees: Mapping[str, int]) -> int:
    """Return the ranks between two neighbours along dp: those along the faster axes."""
    return prod(degrees.get(axis, 1) for axis in AXES[AXES.index("dp") + 1 :])


def _read(text: str) -> tuple[str | None, dict[str, str]]:
    """Return the preset and the settings in `text`, with values as written."""
    preset, settings = None, dict[str, str]()
    words = techniques.in_full(text.lower()).split()
    if not words:
        raise StrategyError("The strategy is empty.", numbers=_vocabulary(), hint="ddp")
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and (place or key not in PRESETS):
            what = "comes after the first word; a preset comes first." if place else "is not a preset."
            raise StrategyError(f"{word!r} {what}", numbers=_vocabulary(), hint=_meant(word, words))
        if equals and key not in RESERVED and not techniques.is_key(key):
            near = difflib.get_close_matches(key, keys(), 1)
            hint = f"{near[0]}={value}" if near else "dp=2"
            raise StrategyError(f"{key!r} is not a key.", numbers=f"keys: {' '.join(keys())}", hint=hint)
        if key in settings:
            raise StrategyError(
                f"{key!r} is given twice.", numbers=f"{key}={settings[key]} and {word}", hint=f"{key}={settings[key]}"
            )
        if equals:
            settings[key] = value
        else:
            preset = key
    return preset, settings


def _meant(word: str, words: Sequence[str]) -> str:
    """Return what a user who typed `word`, one of `words`, as a preset may have meant."""
    if word in PRESETS:
        return " ".join([word, *(other for other in words if "=" in other)])
    if word in schedules.names():
        return f"pp schedule={word}"
    return f"{word}=2" if word in keys() else next(iter(difflib.get_close_matches(word, PRESETS, 1)), "ddp")


def keys() -> tuple[str, ...]:
    """Return every key that a strategy may have, as far as this process knows."""
    return *RESERVED, *techniques.names()


def _vocabulary() -> str:
    return f"presets: {' '.join(PRESETS)}; keys: {' '.join(keys())}"


def _number(key: str, text: str) -> int:
    return whole_number(key, text, least=int(key != "zero"), what="a degree" if key in DEGREES else "")


def _stage(preset: str | None, given: int | None) -> int:
    fixed = _ZERO.get(preset or "")
    if given is not None and ((fixed is not None and given != fixed) or (preset == "hsdp" and given == 0)):
        raise StrategyError(
            f"'zero={given}' contradicts {preset!r}.",
            numbers=f"{preset} is zero={3 if fixed is None else fixed}",
            hint=f"zero={given} without {preset}, or {preset} alone",
        )
    return given if given is not None else 3 if preset == "hsdp" else fixed or 0


def _check_world(degrees: dict[str, int], world_size: int, *, absorber: str | None) -> None:
    """Raise StrategyError unless the degrees multiply to the world.

    absorber: an axis that takes what is left of the world. With one, the degrees only have to divide the world.
    """
    size = prod(degrees.values())
    if size == world_size or (absorber is not None and world_size % size == 0):
        return
    named = {axis: n for axis, n in degrees.items() if n > 1} or dict(list(degrees.items())[:1])
    numbers = f"{' x '.join(f'{axis} {n}' for axis, n in named.items())} = {size} rank{'s' * (size != 1)}"
    numbers += f", the world has {world_size}"
    if absorber is not None and size < world_size:
        numbers += f": {world_size} / {size} = {world_size / size:.3g} left for {absorber}"
    others = {axis: n for axis, n in named.items() if axis != "dp"}
    left, rest = divmod(world_size, prod(others.values()))
    if rest or not left:
        hint = f"degrees that divide {world_size}: {', '.join(map(str, divisors(world_size)))}"
    else:
        fitting = " ".join(f"{axis}={n}" for axis, n in {"dp": left, **others}.items())
        hint = f"{fitting}   or leave dp out: it takes what is left of the world"
    raise StrategyError("The strategy's degrees do not multiply to the number of ranks.", numbers=numbers, hint=hint)


def _hybrid_shard(dp: int, shard: int, neighbours: int | None) -> int:
    """Return the ranks of a sharding group of hsdp.

    The result is `shard` if given; otherwise the most ranks that divide dp, leave a replica and fit in a node.
    neighbours: ranks along dp that share a node. If that is unknown, or if a node holds all of dp or not even two of
    its ranks, the result is the largest proper divisor of dp. It needs the least memory that still replicates.
    """
    proper = [n for n in divisors(dp) if 1 < n < dp]
    if shard == dp or (not shard and not proper):
        raise StrategyError(
            "hsdp shards within groups and replicates across them: it needs at least two groups of two.",
            numbers=f"dp {dp} / shard {dp} = 1 group; between 1 and {dp} dp has "
            + (f"the divisors {', '.join(map(str, proper))}" if proper else "no divisor"),
            hint=f"shard={proper[-1]}" if proper else "zero3",
        )
    near = [n for n in proper if neighbours is None or n <= neighbours] or proper
    return shard or max([n for n in near if neighbours is not None and neighbours % n == 0] or near)


def divisors(n: int) -> list[int]:
    """Return the divisors of `n`, from 1 to `n`."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _simplicity(s: Strategy) -> tuple[object, ...]:
    """Return a sort key: context parallelism last, fewer axes first, data before tensor before pipeline.

    Among those, more replicas come first.
    """
    split = [s.degree(axis) > 1 for axis in DEGREES]
    schedule = schedules.names().index(s.schedule) if s.schedule else -1
    return s.cp > 1, s.ep, sum(split), [not axis for axis in split], [-s.dp, -s.tp], s.zero, -s.shard, schedule
