"""What the user picks: how a job is spread over the ranks.

One spelling everywhere (magic, panel, Python, logs): an optional preset, then key=value, separated by spaces.
In this release data parallelism is trained; every other preset and key is known by name and refused with what
is available, so that nothing is ever silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbkit.errors import StrategyError

__all__ = ["Strategy"]

_AVAILABLE = "available now: ddp, or dp=N"
_LATER_PRESETS = ("zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp")
# The value at which a key of a later release changes nothing, and is therefore accepted.
_NEUTRAL = {"shard": "1", "tp": "1", "pp": "1", "cp": "1", "zero": "0", "microbatches": "1"}
_KEYS = ("dp", *_NEUTRAL, "schedule")


@dataclass(frozen=True)
class Strategy:
    """A valid strategy of a world: `dp` replicas of the model. `str()` is the canonical form, "dp=4"."""

    dp: int

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise StrategyError("dp must be at least 1.", numbers=f"dp={self.dp}", hint="strategy='ddp'")

    @classmethod
    def parse(cls, text: str | Strategy, world_size: int) -> Strategy:
        """The strategy that `text` means on `world_size` ranks.

        Raises StrategyError for an unknown word, for one of a later release, and when the degrees do not
        multiply to the world.
        """
        if isinstance(text, Strategy):
            return cls._fitting(text.dp, world_size)
        dp: int | None = None
        for place, word in enumerate(text.lower().split()):
            key, equals, value = word.partition("=")
            if not equals:
                _check_preset(word, first=place == 0)
            elif key == "dp":
                dp = _degree(word, value)
            else:
                _check_neutral(word, key, value)
        if not text.strip():
            raise StrategyError("An empty strategy.", numbers=_AVAILABLE, hint="strategy='ddp'")
        return cls._fitting(world_size if dp is None else dp, world_size)

    @classmethod
    def _fitting(cls, dp: int, world_size: int) -> Strategy:
        if dp != world_size:
            raise StrategyError(
                "The strategy's degrees do not multiply to the world.",
                numbers=f"dp {dp} = {dp} rank{'s' * (dp != 1)}, the world has {world_size}",
                hint=f"strategy='dp={world_size}', or 'ddp', which takes the world",
            )
        return cls(dp=dp)

    def __str__(self) -> str:
        return f"dp={self.dp}"


def _degree(word: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise StrategyError(f"{word!r} is not a degree.", numbers="a degree is a whole number >= 1", hint="dp=2")
    return int(value)


def _check_preset(word: str, *, first: bool) -> None:
    if word in _LATER_PRESETS:
        raise StrategyError(f"The strategy {word!r} is not in this release.", numbers=_AVAILABLE, hint="strategy='ddp'")
    if word != "ddp" or not first:
        raise StrategyError(
            f"{word!r} is not a preset." if first else f"{word!r} comes after the first word; a preset comes first.",
            numbers=f"presets: ddp {' '.join(_LATER_PRESETS)}; keys: {' '.join(_KEYS)}; {_AVAILABLE}",
            hint="strategy='ddp'",
        )


def _check_neutral(word: str, key: str, value: str) -> None:
    if key not in _KEYS:
        raise StrategyError(f"{key!r} is not a key.", numbers=f"keys: {' '.join(_KEYS)}", hint="strategy='dp=2'")
    if _NEUTRAL.get(key) != value:
        raise StrategyError(f"{word!r} is not in this release.", numbers=_AVAILABLE, hint="strategy='ddp'")
