"""Text from a model that is spread over ranks: every rank takes part in each token, and all say the same.

A Hugging Face model is given the newest token alone, and what it kept of those before (key_value_cache), if that gives
the logits of the whole text: both ways are run on the first prompt under each strategy, and compared. Any other model
gets the whole text so far for each token, which is right under every strategy without the model knowing of it.

Through a pipeline several texts are on their way in different stages at once, in the order of schedules.token_rounds.
On the wire, for each text and token: as in a forward pass, and the token from the last stage to the others of the pp
axis.

Keys and values of the positions that a Hugging Face model has seen, kept while it generates.
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

# transformers 5.24 and later, and before: the argument that a cache is given as.
_NAMES = ("cache", "past_key_values")


class KeyValueCache:
    """What a model of `transformers` takes as its cache, on a rank that holds some of its layers and heads.

    Layers say what they have as ever; how many positions there are is said from outside, since a rank may not hold
    the layer that a model asks for it. Every layer keeps all positions: a model whose window slides masks the others.

    length: positions for which there is room. idle: whether a layer that is called now belongs to another rank, where
    a pipeline only asks for the shape of its output.
    """

    is_compileable = False

    def __init__(self, length: int, idle: Callable[[], bool]) -> None:
        self.length, self.idle = length, idle
        self.seen = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """(keys, values) of all positions (B, H, T, D) so far; those given are behind what is `seen`."""
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
        """Positions before those that the model is called with."""
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first that the model is called with."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, position of the first key). query_length: a number, or, in older versions, the positions."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.seen + new, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit."""
        return -1


def _room(like: Tensor, length: int) -> Tensor:
    return like.new_zeros(*like.shape[:-2], length, like.shape[-1])


def why_no_cache(module: nn.Module) -> str:
    """Why `module` cannot be given a KeyValueCache; empty when it can."""
    of_peft: Any = module
    if hasattr(module, "get_base_model"):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", True):
            return "its adapter puts positions of its own before the text"
        module = of_peft.get_base_model()
    kinds = type(module).__mro__
    if not any(kind.__module__.startswith("transformers.models.") for kind in kinds):
        return "it is no model of transformers, which take cache="
    taken = inspect.signature(type(module).forward).parameters
    config: Any = getattr(module, "config", None)
    if not any(name in taken for name in _NAMES) or "use_cache" not in taken:
        return "its forward takes no cache="
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder"
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(module, "_is_stateful", False) or not layers <= _ATTENTION:
        return "it keeps other states than keys and values"
    return ""


def first_argument(module: nn.Module) -> str:
    """The name under which `module` takes its input."""
    return next(iter(inspect.signature(module.forward).parameters))


def cache_argument(module: nn.Module) -> str:
    """The name under which `module`, one that `why_no_cache` has nothing against, takes its cache."""
    of_peft: Any = module
    base = of_peft.get_base_model() if hasattr(module, "get_base_model") else module
    taken = inspect.signature(type(base).forward).parameters
    return next(name for name in _NAMES if name in taken)


_LENGTHS = ("block", "block_size", "max_position_embeddings", "n_positions")
_ROUNDS = 32
"""Tokens of each text in one run of a pipeline: what a stage has sent is held to the end of the run, and filling the
pipeline anew takes as long as its depth."""

Prompt = str | bytes | Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0: the likeliest. top_k: among this many. seed: of the draws."""

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise TrainingError("top_k is at least 1.", numbers=f"top_k={self.top_k}", hint="top_k=50")
        if not self.temperature >= 0:
            raise TrainingError(
                "temperature is 0 or more.", numbers=f"temperature={self.temperature}", hint="temperature=0.8"
            )

    def pick(self, logits: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        """(B, 1) token ids out of (B, V) logits; each row has a generator of its own."""
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
    """`prompt` continued by `tokens` tokens. Collective: every rank calls it with the same arguments.

    prompt: ids (T,) or (B, T), or text, whose UTF-8 bytes are the ids; then bytes come back. Or several of them, of
    any lengths: a list comes back. The i-th text draws by seed + i, whatever is generated beside it.
    Raises TrainingError when the model gives no logits (B, T, V), and for prompts without ids.
    """
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    prompts: list[Prompt] = list(prompt) if several else [prompt]  # type: ignore[arg-type, list-item]
    rows = [row for one in prompts for row in _rows(one)]
    if not tokens or not rows:
        new = [row.new_empty(0) for row in rows]
    else:
        with sharded_model.evaluating():
            cached = tokens > 1 and not _why_no_cache(sharded_model, rows[0], inputs, device)
            new = _Generation(sharded_model, rows, tokens, inputs, sampling, device, cached=cached).run()
    texts = iter([torch.cat([row.to(device), more]) for row, more in zip(rows, new, strict=True)])
    answers = [_like(one, [next(texts) for _ in _rows(one)]) for one in prompts]
    return answers if several else answers[0]


def _why_no_cache(model: ShardedModel, row: Tensor, inputs: Sequence[str] | None, device: torch.device) -> str:
    """Why nothing is kept while several tokens are generated; "" where it is. Collective. Warns of it.

    What a model declares says that it may be given a cache. That it is right is seen by running: once for a sharded
    model, before its first text. row: that text's prompt.
    """
    if model.no_cache is None:
        model.no_cache = why_no_cache(model.module) or _tried(model, row, inputs, device)
    if model.no_cache and not model.axes.rank:
        # The filter of Python shows what comes from one line once.
        warnings.warn(
            f"{type(model.module).__name__} keeps no keys and values while it generates, so that each token takes "
            f"the whole text anew: {model.no_cache}.",
            stacklevel=1,
        )
    return model.no_cache


def _tried(model: ShardedModel, row: Tensor, inputs: Sequence[str] | None, device: torch.device) -> str:
    """Return how far the logits of the tokens behind `row` are off where the model keeps keys and values; "" where
    not."""
    row = row[: _longest(model.module) - _TRIED]
    if not len(row):
        return "it knows too few positions to try it"
    # The same tokens both ways, whatever the model would choose.
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
    if parts <= 1e9 * _ROUNDING[dtype.itemsize]:
        return ""
    return f"with them the logits of the next {_TRIED - 1} tokens differ by {parts / 1e9:.2g} of the largest"


_TRIED = 3
"""Tokens by which both ways are compared: the first comes of the whole prompt, the others of what was kept."""

_ROUNDING = {1: 5e-2, 2: 5e-2, 4: 1e-4, 8: 1e-6}
"""Bytes of an element of the weights -> what is rounding in logits, which are float32 when a token is chosen."""


@dataclass(frozen=True)
class _Given(Sampling):
    """Chooses the tokens that were `given`, one after the other, and keeps the logits that it has `seen`."""

    given: Sequence[int] = ()
    seen: list[Tensor] = field(default_factory=list)

    def pick(self, logits: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        self.seen.append(logits)
        return torch.full((len(logits), 1), self.given[len(self.seen) - 1], device=logits.device)


def _rows(prompt: Prompt) -> list[Tensor]:
    """Its ids, one (T,) for each text."""
    raw = prompt.encode() if isinstance(prompt, str) else prompt
    ids = torch.tensor(list(raw or b"\n")) if isinstance(raw, bytes) else raw
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or not ids.numel():
        shape = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TrainingError("A prompt is text, or ids (T,) or (B, T), of one token or more.", numbers=f"got {shape}")
    return list(ids.long().view(-1, ids.shape[-1]))


def _like(prompt: Prompt, texts: list[Tensor]) -> bytes | Tensor:
    if isinstance(prompt, str | bytes):
        return bytes(texts[0].tolist())
    return texts[0] if prompt.ndim == 1 else torch.stack(texts)


@dataclass
class _Texts:
    """Texts of one length that go through the model together. ids: (B, T); numbers: which of all texts they are."""

    numbers: list[int]
    ids: Tensor
    draws: list[torch.Generator]
    cache: KeyValueCache | None


class _Generation:
    """Under way on one rank. rows: the texts, (T,) each."""

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
        """Numbers of texts that are computed together: of one length, and no more than leaves every stage some."""
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
            meet_all(group, self.device)  # of the broadcasts below
        with together() if self.cached else nullcontext():
            for start in range(0, self.tokens, _ROUNDS):
                count = min(_ROUNDS, self.tokens - start)
                self.known = 0
                self.model.rounds(count, len(self.texts), self._forward, key=self._shape)
                self._learn(count * len(self.texts))
        found = {i: row[self.lengths[i] :] for t in self.texts for i, row in zip(t.numbers, t.ids, strict=True)}
        return [found[i] for i in range(len(found))]

    def _value(self, texts: _Texts) -> tuple[Tensor, KeyValueCache | None]:
        """(ids that the model gets now, what it has kept of those before)."""
        ids, cache = texts.ids, texts.cache
        if cache is None or ids.shape[1] > self.longest:
            # Beyond the positions that it knows, a model sees the last of them, each at another place than before.
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
            # Awaited as soon as it is on its way: the ranks between may have to hand it on.
            self._broadcast(torch.empty(len(texts.ids), 1, dtype=torch.long, device=self.device))
        output = self.model.stage(stage, value, received)
        if stage != self.model.last_stage:
            return output  # type: ignore[no-any-return]
        chosen = self.sampling.pick(_last_logits(output), texts.draws).to(self.device)
        self._broadcast(chosen)
        return (chosen,)

    def _broadcast(self, chosen: Tensor) -> None:
        """Send or receive the token of the next number. Collective along pp, in the order of numbers."""
        axes = self.model.axes
        group = axes.group("pp")
        work = None if group is None else dist.broadcast(chosen, src=self.source, group=group, async_op=True)
        self.coming.append((chosen, work))

    def _learn(self, until: int) -> None:
        """Take the tokens of the forwards before `until`."""
        while self.known < until:
            chosen, work = self.coming.popleft()
            if work is not None:
                work.wait()
            texts = self.texts[self.known % len(self.texts)]
            texts.ids = torch.cat([texts.ids, chosen], dim=1)
            self.known += 1

    def _shape(self, number: int) -> tuple[Any, ...]:
        """Return what the shapes between stages depend on."""
        texts = self.texts[number % len(self.texts)]
        total = texts.ids.shape[1] + number // len(self.texts)  # asked before the first forward of a run
        if texts.cache is not None and self.lengths[texts.numbers[0]] < total <= self.longest:
            return ("generate", len(texts.ids), 1)
        return ("generate", len(texts.ids), min(total, self.longest))


def _last_logits(output: Any) -> Tensor:
    """(B, V), float32, of the last position."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TrainingError(
            "The model gives no logits to generate from.", numbers=f"got {got}", hint="a model of (B, T) -> (B, T, V)"
        )
    return logits[:, -1].float()


def _longest(module: nn.Module) -> int:
    """Positions that the model knows, as its config says; without one, no limit."""
    config = getattr(module, "config", None)
    known = [value for name in _LENGTHS if isinstance(value := getattr(config, name, None), int)]
    return min(known, default=1 << 30)
