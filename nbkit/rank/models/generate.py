"""Generates text from a model that is split over ranks. Every rank takes part in each token and returns the same text.

A Hugging Face model gets only the newest token, and a cache of the keys and values of earlier positions
(`KeyValueCache`). This is correct only if the logits are the same as for the whole text. So both ways are run and
compared on the first prompt under each strategy. Any other model gets the whole text for each token. This is correct
under every strategy, and needs no support by the model.

In a pipeline, several texts are in different stages at once, in the order of schedules.token_rounds. For each text and
token, ranks send what they send in a forward pass. Then the last stage sends the token to the other ranks of the pp
axis.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import largest
from nbkit.rank.parallel.context.context_parallel import together
from nbkit.rank.parallel.pipeline.p2p import meet_all
from nbkit.rank.parallel.proof.observe import gap
from nbkit.rank.parallel.sharded_model import ShardedModel

_ATTENTION = {"full_attention", "sliding_attention"}

# The name of the argument for a cache, in transformers 5.24 and later, and in earlier versions.
_NAMES = ("cache", "past_key_values")


class KeyValueCache:
    """A cache for a model of `transformers`, on a rank that holds some of its layers and heads.

    Layers add their keys and values as usual. The caller sets the number of positions, `seen`. A model would ask its
    first layer for this number, and this rank may not hold that layer. Every layer keeps all positions. A model with a
    sliding window masks those outside the window.

    length: the maximum number of positions. idle: returns True if the current layer belongs to another rank, and the
    pipeline only needs the shape of its output.
    """

    is_compileable = False

    def __init__(self, length: int, idle: Callable[[], bool]) -> None:
        self.length, self.idle = length, idle
        self.seen = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values after the first `seen` positions, and return those of all positions, (B, H, T, D)."""
        stop = self.seen + keys.shape[-2]
        if self.idle():
            return _room(keys, stop), _room(values, stop)
        if layer_idx not in self._layers:
            self._layers[layer_idx] = _room(keys, self.length), _room(values, self.length)
        for kept, new in zip(self._layers[layer_idx], (keys, values), strict=True):
            kept[..., self.seen : stop, :] = new
        own = self._layers[layer_idx]
        return own[0][..., :stop, :], own[1][..., :stop, :]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions before those that the model is called with."""
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the first position that the model is called with."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Return (number of keys, position of the first key). query_length: a number; a tensor in older versions."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.seen + new, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit."""
        return -1


def _room(like: Tensor, length: int) -> Tensor:
    return like.new_zeros(*like.shape[:-2], length, like.shape[-1])


def why_no_cache(module: nn.Module) -> str:
    """Return why `module` cannot be given a KeyValueCache; "" if it can."""
    of_peft: Any = module
    if hasattr(module, "get_base_model"):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", True):
            return "its adapter adds positions before the text"
        module = of_peft.get_base_model()
    kinds = type(module).__mro__
    if not any(kind.__module__.startswith("transformers.models.") for kind in kinds):
        return "only models of transformers take cache="
    taken = inspect.signature(type(module).forward).parameters
    config: Any = getattr(module, "config", None)
    if not any(name in taken for name in _NAMES) or "use_cache" not in taken:
        return "its forward has no argument cache="
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder"
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(module, "_is_stateful", False) or not layers <= _ATTENTION:
        return "it keeps states that are not keys and values"
    return ""


def first_argument(module: nn.Module) -> str:
    """Return the name of the argument for the input of `module`."""
    return next(iter(inspect.signature(module.forward).parameters))


def cache_argument(module: nn.Module) -> str:
    """Return the name of the argument for the cache of `module`. `why_no_cache` must be "" for it."""
    of_peft: Any = module
    base = of_peft.get_base_model() if hasattr(module, "get_base_model") else module
    taken = inspect.signature(type(base).forward).parameters
    return next(name for name in _NAMES if name in taken)


_LENGTHS = ("block", "block_size", "max_position_embeddings", "n_positions")
_ROUNDS = 32
"""The number of tokens of each text in one run of a pipeline. Longer runs take more memory, because a stage keeps what
it has sent until the end of the run. Shorter runs fill the pipeline more often."""

Prompt = str | bytes | Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing a token. temperature: 0 takes the likeliest. top_k: choose among the likeliest top_k.

    seed: seed of the random draws.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise TrainingError("top_k must be at least 1.", numbers=f"top_k={self.top_k}", hint="top_k=50")
        if not self.temperature >= 0:
            raise TrainingError(
                "temperature must be at least 0.", numbers=f"temperature={self.temperature}", hint="temperature=0.8"
            )

    def pick(self, logits: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        """Return token ids (B, 1) chosen from logits (B, V). Each row has its own generator."""
        if not self.temperature:
            return logits.argmax(dim=-1, keepdim=True)
        logits = logits.cpu() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = torch.softmax(logits, dim=-1)
        rows = zip(chances, draws, strict=True)
        return torch.stack([torch.multinomial(row, 1, generator=draw) for row, draw in rows])


def generate(
    sharded_model: ShardedModel,
    prompt: Prompt | Sequence[Prompt],
    tokens: int,
    *,
    inputs: Sequence[str] | None,
    sampling: Sampling,
    device: torch.device,
) -> Any:
    """Return `prompt` continued by `tokens` tokens. Collective: every rank calls it with the same arguments.

    prompt: ids (T,) or (B, T), or text. The UTF-8 bytes of a text are its ids, and bytes are returned. A sequence of
    prompts, of any lengths, gives a list. The i-th text draws with seed + i, independent of the other texts.
    Raises TrainingError if the model gives no logits (B, T, V), and for prompts without ids.
    """
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    prompts: list[Prompt] = list(prompt) if several else [prompt]  # type: ignore[arg-type, list-item]
    rows = [row for one in prompts for row in _rows(one)]
    if not tokens or not rows:
        new = [row.new_empty(0) for row in rows]
    else:
        with sharded_model.evaluating():
            cached = tokens > 1 and not _why_no_cache(sharded_model, rows[0], inputs, device, tokens)
            new = _Generation(sharded_model, rows, tokens, inputs, sampling, device, cached=cached).run()
    texts = iter([torch.cat([row.to(device), more]) for row, more in zip(rows, new, strict=True)])
    answers = [_like(one, [next(texts) for _ in _rows(one)]) for one in prompts]
    return answers if several else answers[0]


_COSTLY = 100
"""The least number of tokens of which a warning says that each token computes the whole text again."""


def _why_no_cache(
    model: ShardedModel, row: Tensor, inputs: Sequence[str] | None, device: torch.device, tokens: int
) -> str:
    """Return why the model generates without a cache; "" if it uses one. Collective.

    A model declares that it takes a cache. Before the first text of a sharded model, a trial shows whether its results
    are correct. row: the prompt for the trial. If there is no cache and `tokens` is large, a warning says so.
    """
    if model.no_cache is None:
        model.no_cache = why_no_cache(model.module) or _tried(model, row, inputs, device)
    if model.no_cache and tokens >= _COSTLY and not model.axes.rank:
        # Python's warning filter shows a warning from one line only once.
        warnings.warn(
            f"{type(model.module).__name__} cannot keep keys and values while it generates, so each token computes "
            f"the whole text again: {model.no_cache}.",
            stacklevel=1,
        )
    return model.no_cache


def _tried(model: ShardedModel, row: Tensor, inputs: Sequence[str] | None, device: torch.device) -> str:
    """Return why the model cannot use a cache for the tokens after `row`; "" if it can.

    It cannot if it raises an error with a cache, or if its logits then differ from those for the whole text.
    """
    row = row[: _longest(model.module) - _TRIED]
    if not len(row):
        return "it has too few positions for a trial"
    # Both runs get the same tokens, whatever the model would choose.
    given = [int(row[i % len(row)]) for i in range(_TRIED)]
    whole, kept = _Given(given=given), _Given(given=given)
    _Generation(model, [row], _TRIED, inputs, whole, device, cached=False).run()
    failed = ""
    try:
        _Generation(model, [row], _TRIED, inputs, kept, device, cached=True).run()
    except Exception as error:
        if model.pipeline is not None:
            raise  # other stages wait for this one
        failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    off = 0.0 if failed else max((gap(a, b) for a, b in zip(whole.seen, kept.seen, strict=True)), default=0.0)
    failures, parts = largest([bool(failed), int(min(off, 1e3) * 1e9)], device=device)
    if failures:
        return f"with them it fails: {failed or 'on another rank'}"
    dtype = min((p.dtype for p in model.module.parameters() if p.is_floating_point()), key=lambda kind: kind.itemsize)
    # In fp8, a difference in the last digit can round a number to its neighbour.
    if parts <= 1e9 * _ROUNDING[1 if model.plan.options.fp8 else dtype.itemsize]:
        return ""
    return f"with them the logits of the next {_TRIED - 1} tokens differ by {parts / 1e9:.2g} of the largest"


_TRIED = 3
"""The number of tokens in the trial of a cache. The first comes from the whole prompt, the others use the cache."""

_ROUNDING = {1: 5e-2, 2: 5e-2, 4: 1e-4, 8: 1e-6}
"""The relative difference of logits that counts as rounding, by bytes per element of the weights. Logits are float32
when a token is chosen."""


@dataclass(frozen=True)
class _Given(Sampling):
    """Sampling that returns the `given` tokens one after the other, and keeps the logits in `seen`."""

    given: Sequence[int] = ()
    seen: list[Tensor] = field(default_factory=list)

    def pick(self, logits: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        self.seen.append(logits)
        return torch.full((len(logits), 1), self.given[len(self.seen) - 1], device=logits.device)


def _rows(prompt: Prompt) -> list[Tensor]:
    """Return the ids of `prompt`, a tensor (T,) for each text."""
    raw = prompt.encode() if isinstance(prompt, str) else prompt
    ids = torch.tensor(list(raw or b"\n")) if isinstance(raw, bytes) else raw
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or not ids.numel():
        shape = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TrainingError(
            "A prompt must be text, or ids of shape (T,) or (B, T), with at least one token.", numbers=f"got {shape}"
        )
    return list(ids.long().view(-1, ids.shape[-1]))


def _like(prompt: Prompt, texts: list[Tensor]) -> bytes | Tensor:
    if isinstance(prompt, str | bytes):
        return bytes(texts[0].tolist())
    return texts[0] if prompt.ndim == 1 else torch.stack(texts)


@dataclass
class _Texts:
    """Texts of one length that go through the model together. ids: (B, T). numbers: their indices in all texts."""

    numbers: list[int]
    ids: Tensor
    draws: list[torch.Generator]
    cache: KeyValueCache | None


class _Generation:
    """The state of a generation on one rank. rows: the ids of each prompt, (T,)."""

    def __init__(
        self,
        model: ShardedModel,
        rows: list[Tensor],
        tokens: int,
        inputs: Sequence[str] | None,
        sampling: Sampling,
        device: torch.device,
        *,
        cached: bool,
    ) -> None:
        self.model, self.tokens, self.sampling, self.device = model, tokens, sampling, device
        self.longest = _longest(model.module)
        self.input = inputs[0] if inputs is not None else first_argument(model.module) if cached else None
        self.cached = cached
        self.cache_argument = cache_argument(model.module) if cached else ""
        self.lengths = [len(row) for row in rows]
        self.texts = [self._texts(rows, numbers) for numbers in self._together()]
        self.known = 0
        self.coming: deque[tuple[Tensor, dist.Work | None]] = deque()
        self.source: int | None = None
        if model.pipeline is not None:
            pipeline = model.axes.mesh.ranks("pp", model.axes.rank)
            self.source = pipeline[model.pipeline.schedule.rank_of(model.last_stage)]

    def _together(self) -> list[list[int]]:
        """Return lists of indices of texts that are computed together.

        The texts of a list have one length. Lists are small enough to fill all stages of a pipeline.
        """
        stages = 1 if self.model.pipeline is None else self.model.pipeline.schedule.num_stages
        most = -(-len(self.lengths) // stages)
        found = []
        by_length = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        for _, some in groupby(by_length, key=self.lengths.__getitem__):
            alike = list(some)
            found += [alike[i : i + most] for i in range(0, len(alike), most)]
        return found

    def _texts(self, rows: list[Tensor], numbers: list[int]) -> _Texts:
        ids = torch.stack([rows[i] for i in numbers]).to(self.device)
        draws = [torch.Generator().manual_seed(self.sampling.seed + i) for i in numbers]
        room = min(ids.shape[1] + self.tokens, self.longest)
        cache = KeyValueCache(room, self.model.idle) if self.cached and ids.shape[1] <= self.longest else None
        return _Texts(numbers, ids, draws, cache)

    def run(self) -> list[Tensor]:
        """Return the new tokens of each text."""
        if (group := self.model.axes.group("pp")) is not None:
            meet_all(group, self.device)  # connects the ranks for the broadcasts below
        with together() if self.cached else nullcontext():
            for start in range(0, self.tokens, _ROUNDS):
                count = min(_ROUNDS, self.tokens - start)
                self.known = 0
                self.model.rounds(count, len(self.texts), self._forward, key=self._shape)
                self._learn(count * len(self.texts))
        found = {i: row[self.lengths[i] :] for t in self.texts for i, row in zip(t.numbers, t.ids, strict=True)}
        return [found[i] for i in range(len(found))]

    def _value(self, texts: _Texts) -> tuple[Tensor, KeyValueCache | None]:
        """Return (ids for the next forward pass, the cache of the earlier positions or None)."""
        ids, cache = texts.ids, texts.cache
        if cache is None or ids.shape[1] > self.longest:
            # The text is longer than the model's positions, or there is no cache. The model gets the end of the text.
            texts.cache = None
            return ids[:, -self.longest :], None
        return (ids, cache) if ids.shape[1] == self.lengths[texts.numbers[0]] else (ids[:, -1:], cache)

    def _forward(self, stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._learn(number - len(self.texts) + 1)
        texts = self.texts[number % len(self.texts)]
        ids, cache = self._value(texts)
        value: Any = ids if self.input is None else {self.input: ids}
        if cache is not None:
            cache.seen = texts.ids.shape[1] - ids.shape[1]
            value |= {self.cache_argument: cache, "use_cache": True}
        if not self.model.gives_output and self.known + len(self.coming) == number:
            # Start to receive the token early, because a rank in a broadcast may have to pass it on to others.
            self._broadcast(torch.empty(len(texts.ids), 1, dtype=torch.long, device=self.device))
        output = self.model.stage(stage, value, received)
        if stage != self.model.last_stage:
            return output  # type: ignore[no-any-return]
        chosen = self.sampling.pick(_last_logits(output), texts.draws).to(self.device)
        self._broadcast(chosen)
        return (chosen,)

    def _broadcast(self, chosen: Tensor) -> None:
        """Start to send or receive the tokens of the next forward pass. Collective along pp, in the order of passes."""
        axes = self.model.axes
        group = axes.group("pp")
        work = None if group is None else dist.broadcast(chosen, src=self.source, group=group, async_op=True)
        self.coming.append((chosen, work))

    def _learn(self, until: int) -> None:
        """Append the tokens of the forward passes before number `until` to the texts."""
        while self.known < until:
            chosen, work = self.coming.popleft()
            if work is not None:
                work.wait()
            texts = self.texts[self.known % len(self.texts)]
            texts.ids = torch.cat([texts.ids, chosen], dim=1)
            self.known += 1

    def _shape(self, number: int) -> tuple[Any, ...]:
        """Return a key that is equal for forward passes with equal shapes between stages."""
        texts = self.texts[number % len(self.texts)]
        total = texts.ids.shape[1] + number // len(self.texts)  # called before the first forward pass of a run
        if texts.cache is not None and self.lengths[texts.numbers[0]] < total <= self.longest:
            return ("generate", len(texts.ids), 1)
        return ("generate", len(texts.ids), min(total, self.longest))


def _last_logits(output: Any) -> Tensor:
    """Return the float32 logits (B, V) of the last position."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TrainingError(
            "The model gives no logits to generate from.", numbers=f"got {got}", hint="a model of (B, T) -> (B, T, V)"
        )
    return logits[:, -1].float()


def _longest(module: nn.Module) -> int:
    """Return the maximum number of positions by the model's config; a huge number if the config has no limit."""
    config = getattr(module, "config", None)
    known = [value for name in _LENGTHS if isinstance(value := getattr(config, name, None), int)]
    return min(known, default=1 << 30)
