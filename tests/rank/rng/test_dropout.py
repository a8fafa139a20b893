"""Test that dropout drops the same elements for any part of the batch, the sequence or the model.

Masks are hashes of coordinates, as random as coins, and the same bits everywhere.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend import PretendAccelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank import device
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.rng.draw_plan import extent, extent_of, gathered, place_of
from nbkit.rank.rng.dropout_masks import coordinates, dropped, key_of
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.train.config import TrainConfig

ROWS, LENGTH, WIDTH, HEADS = 4, 6, 8, 2


class Everything(nn.Module):
    """A model that uses every kind of dropout in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dropout(0.3), nn.Dropout(0.3, inplace=True)
        self.channels, self.alpha, self.both = nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)
        self.heads = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.3, batch_first=True)
        self.turned = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.3)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x) + self.a(x) + self.b(x * 1)
        x = x + self.channels(x) + self.alpha(x) + self.both(x)
        x = x + F.dropout(self.linear(x), 0.3, self.training) + torch.dropout(x, 0.3, self.training)
        x = x + self.heads(x, x, x, need_weights=False)[0] + self.heads(x, x, x, need_weights=True)[0]
        x = x + self.encoder(x) + self.turned(x.transpose(0, 1)).transpose(0, 1)
        x = x + F.dropout(x.flatten(0, 1), 0.3, self.training).view_as(x)
        x = x + F.dropout2d(x.unflatten(2, (HEADS, -1)).transpose(1, 2), 0.3, self.training).transpose(1, 2).flatten(2)
        q = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        drop = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], dropout_p=drop, is_causal=True, enable_gqa=True)
        return x + y.transpose(1, 2).flatten(2)


def everything() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Everything().double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)


def gpt(dropout: float = 0.2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=32, block=16, layers=2, heads=2, width=16, dropout=dropout)).double()
    return model, torch.randint(32, (ROWS, LENGTH))


def gpt2(attention: str) -> tuple[nn.Module, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_head=2, n_layer=2, use_cache=False, attn_implementation=attention
    )
    return GPT2LMHeadModel(config).double().train(), torch.randint(32, (ROWS, LENGTH))


def plain(output: Any) -> Tensor:
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "build", [everything, gpt, lambda: gpt2("sdpa"), lambda: gpt2("eager")], ids=["all", "gpt", "sdpa", "eager"]
)
def test_micro_batches_drop_the_same_elements_as_the_whole_batch(build: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, x = build()
    keyed = KeyedDropout(model, seed=1)
    before = torch.get_rng_state()
    with keyed.step(5, range(ROWS)):
        whole = plain(model(x))
    parts = []
    for rows in ([3], [0, 1], torch.tensor([2])):
        with keyed.step(5, rows):
            parts.append(plain(model(x[rows])))
    with keyed.step(6, range(ROWS)):
        later = plain(model(x))

    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(torch.cat([*parts[1:], parts[0]]), whole, rtol=1e-12, atol=1e-12)
    assert (later - whole).abs().max() > 1e-3 < (plain(model.eval()(x)) - whole).abs().max()


def test_attention_that_drops_nothing_equals_that_of_torch() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, LENGTH, WIDTH, dtype=torch.float64) for heads in (4, 2, 2))
    allowed = torch.rand(2, 1, LENGTH, LENGTH) < 0.7
    allowed[0, 0, 0] = False
    model = nn.Module()
    keyed = KeyedDropout(model, seed=0)
    for options in (
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": allowed},
        {"attn_mask": torch.randn(2, 1, LENGTH, LENGTH, dtype=torch.float64)},
    ):
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        with keyed.step(0, range(2)):
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, enable_gqa=True, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_part_of_a_tensor_gets_its_part_of_the_mask() -> None:
    def drop(x: Tensor) -> Tensor:
        with KeyedDropout(nn.Module(), seed=1).step(2, range(ROWS)):
            return F.dropout(x, 0.5)

    hidden, probs = torch.ones(ROWS, LENGTH, WIDTH), torch.ones(ROWS, HEADS, LENGTH, LENGTH)
    whole, attention = drop(hidden), drop(probs)
    with extent("sequence", 2, LENGTH):
        assert torch.equal(drop(hidden[:, 2:5]), whole[:, 2:5])
        assert torch.equal(drop(probs[:, :, 2:5]), attention[:, :, 2:5])
        with extent("sequence", 1, 4), extent("feature", 3, WIDTH):
            assert torch.equal(drop(hidden[:, 3:5, 3:]), whole[:, 3:5, 3:])
            assert torch.equal(drop(hidden[:, 3:5, 3:].flatten(0, 1)).view(ROWS, 2, -1), whole[:, 3:5, 3:])
            assert extent_of("sequence") == (1, 4) and place_of("sequence") == (3, LENGTH)
            with gathered("sequence"):
                assert extent_of("sequence") == place_of("sequence") == (2, LENGTH)
    with extent("sequence", ((1, 3), (LENGTH - 1, LENGTH)), LENGTH):
        places = [1, 2, LENGTH - 1]
        assert torch.equal(drop(hidden[:, places]), whole[:, places])
        assert torch.equal(drop(probs[:, :, places]), attention[:, :, places])
        assert extent_of("sequence") == place_of("sequence") == (1, LENGTH)
        with extent("sequence", 1, 3):
            assert torch.equal(drop(hidden[:, places[1:]]), whole[:, places[1:]])
        with pytest.raises(TrainingError, match="larger than its part of the sequence"):
            drop(hidden[:, :4])
    with extent("head", 1, HEADS):
        assert torch.equal(drop(probs[:, 1:]), attention[:, 1:])
        assert torch.equal(drop(probs[:, 1:].flatten(0, 1)), attention[:, 1])
        with pytest.raises(TrainingError, match="larger than its part of the head"):
            drop(probs)
        with pytest.raises(TrainingError, match="cannot find which dim was divided"):
            drop(probs[..., None])
    assert extent_of("head") is place_of("head") is None


def test_a_stage_draws_the_numbers_of_the_whole_model() -> None:
    """Check that the draws are the same, whatever else runs or fails in this process."""
    model, x = gpt()
    seen: list[Tensor] = []
    hook = model.blocks[1].register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    keyed = KeyedDropout(model, seed=1)
    with keyed.step(0, range(ROWS)):
        model(x)
    hook.remove()
    received, whole = seen
    ones = torch.ones(ROWS, WIDTH)
    with keyed.step(0, range(ROWS)):
        outside = F.dropout(ones, 0.5)
        more = F.dropout(ones, 0.5)
    with keyed.step(0, range(ROWS)):
        with pytest.raises(RuntimeError):
            model.blocks[0](received[..., :3])
        alone = model.blocks[1](received)
        again = model.blocks[1](received)
        assert torch.equal(F.dropout(ones, 0.5), outside)

    assert not torch.equal(more, outside)
    assert torch.equal(alone, whole)
    assert not torch.equal(again, alone)  # the second call of a module in one pass


def test_a_copy_of_a_keyed_model_drops_the_same_elements() -> None:
    model, x = gpt()
    with KeyedDropout(model, seed=1).step(0, range(ROWS)):
        whole = model(x)
    twin = copy.deepcopy(model)
    other = KeyedDropout(model, seed=1)
    for module, keyed in ((twin, KeyedDropout(twin, seed=1)), (model, other), (model, KeyedDropout(model, seed=1))):
        with keyed.step(0, range(ROWS)):
            assert torch.equal(module(x), whole)
        keyed.release()
    with other.step(0, range(ROWS)):  # another owner has removed the hooks
        assert torch.equal(model(x), whole)


class Literal(nn.Module):
    """A model whose dropout probability is written only in its code."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.forward = lambda x: self.drop(F.dropout(self.linear(x), p, self.training))  # type: ignore[method-assign]


def test_a_model_without_dropout_gets_no_hooks() -> None:
    model, x = Literal(0.0), torch.randn(ROWS, WIDTH)
    keyed = KeyedDropout(model, seed=0)

    def hooks() -> int:
        return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())

    with keyed.step(0, range(ROWS)):
        model(x)
    with keyed.step(1, range(ROWS)):
        assert torch._C._len_torch_function_stack() == 0 == hooks()
    model.drop.p = 0.5  # a live cell
    with keyed.step(2, range(ROWS)):
        first = model(x)
    with keyed.step(2, range(ROWS)):
        assert hooks() > 0 and torch.equal(first, model(x)) and bool((first == 0).any())
    keyed.release()
    assert hooks() == 0


def test_a_dropout_probability_in_the_code_is_found() -> None:
    model, x = Literal(0.5), torch.randn(ROWS, WIDTH)
    keyed = KeyedDropout(model, seed=0)
    outputs = []
    for _ in range(3):
        with keyed.step(4, range(ROWS)):
            outputs.append(model(x))

    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize(
    ("drop", "what"),
    [
        (lambda: F.dropout(torch.ones(LENGTH, ROWS), 0.5), "dim 0 is not the sample"),
        (lambda: F.dropout(torch.ones(1, LENGTH, WIDTH), 0.5), "dim 0 is not the sample"),
        (lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5)(torch.ones(LENGTH, ROWS, WIDTH)), "recurrent layer"),
        (lambda: nn.GRU(WIDTH, WIDTH, 2, dropout=0.5)(torch.ones(LENGTH, ROWS, WIDTH)), "recurrent layer"),
        (
            lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5)(
                nn.utils.rnn.pack_padded_sequence(torch.ones(LENGTH, ROWS, WIDTH), torch.tensor([6, 5, 4, 2]))
            ),
            "recurrent layer",
        ),
    ],
    ids=["no samples", "broadcast", "lstm", "gru", "packed"],
)
def test_dropout_that_cannot_be_keyed_is_refused(drop: Callable[[], Any], what: str) -> None:
    with pytest.raises(TrainingError, match=what), KeyedDropout(nn.Module(), seed=0).step(0, range(ROWS)):
        drop()


def test_dropout_is_right_for_probabilities_0_and_1_empty_tensors_and_bfloat16() -> None:
    nothing_left = torch.ones(ROWS, WIDTH, requires_grad=True)
    with KeyedDropout(nn.Module(), seed=0).step(0, range(ROWS)):
        assert not F.dropout(nothing_left, 1.0).any()
        assert F.dropout(nothing_left, 0.0) is nothing_left
        assert F.dropout(nothing_left, 0.5, training=False) is nothing_left
        assert F.dropout(torch.ones(0, WIDTH), 0.5).shape == (0, WIDTH)
        half = F.dropout(nothing_left.to(torch.bfloat16), 0.5)
        assert half.dtype == torch.bfloat16 and set(half.flatten().tolist()) == {0.0, 2.0}
        nn.LSTM(WIDTH, WIDTH, 2)(torch.ones(LENGTH, ROWS, WIDTH))
    half.sum().backward()
    assert torch.equal(nothing_left.grad, half.float())


class Foreign(torch.autograd.Function):
    """A user's own function that recomputes in backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(again), grad)
        return None, again.grad


class Recomputing(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def gradients_of(call: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = Recomputing(call).double(), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with KeyedDropout(module, 1).step(3, range(6)):
        loss = module(x).square().sum()
    loss.backward()
    return [p.grad for p in (x, *module.parameters()) if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_recomputes_its_blocks_drops_the_same_elements_again(reentrant: bool) -> None:
    expected = gradients_of(lambda block, x: block(x))

    found = gradients_of(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_users_recomputation_that_would_drop_other_elements_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"blocks\.2\.1 is recomputed in the backward pass"):
        gradients_of(lambda block, x: Foreign.apply(block, x))


class Around(TorchFunctionMode):
    """A mode that does nothing, like torch.set_default_device if no tensor is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_users_torch_function_mode_changes_no_mask() -> None:
    model, x = everything()
    keyed = KeyedDropout(model, 0)
    with keyed.step(0, range(ROWS)):
        alone = model(x)
    with Around(), keyed.step(0, range(ROWS)):
        inside = model(x)

    assert torch.equal(alone, inside)


def test_fused_attention_dropout_is_keyed_and_leaves_the_generator_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_hand(*_: Any) -> Tensor:
        raise AssertionError("the probabilities are in memory")

    monkeypatch.setattr(torch, "_safe_softmax", by_hand)
    model, x = everything()
    model.heads.forward = lambda q, *_, **__: (q, None)  # type: ignore[assignment]  # with weights, no kernel drops
    fused, before = KeyedDropout(model, 3, fused=True), torch.get_rng_state()

    def run(step: int, first: int = 0, head: int = 0) -> Tensor:
        with torch.no_grad(), fused.step(step, range(first, first + ROWS)), extent("head", head, head + HEADS):
            q = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    with pytest.warns(UserWarning, match=r"Compute\(dropout='keyed'\) keeps its masks"):
        once = run(0)
    with torch.no_grad(), fused.step(0, range(ROWS)):
        whole = model(x)
    with torch.no_grad(), fused.step(0, range(ROWS)):
        assert torch.equal(model(x), whole)

    assert torch.equal(run(0), once) and torch.equal(torch.get_rng_state(), before)
    assert all(not torch.equal(other, once) for other in (run(1), run(0, first=ROWS), run(0, head=HEADS)))


def test_attention_drops_in_its_kernel_on_request_and_by_default_on_devices() -> None:
    def fuses(dropout: str | None) -> bool:
        return TrainConfig(loss=F.mse_loss, compute=nbkit.Compute(dropout=dropout)).fuses_dropout(torch.device("cpu"))

    assert (fuses(None), fuses("keyed"), fuses("fused")) == (False, False, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_accelerator", PretendAccelerator())
        assert (fuses(None), fuses("keyed"), fuses("fused")) == (True, False, True)
    with pytest.raises(TrainingError, match="no dropout 'fast'"):
        fuses("fast")


class SoftmaxDtypes(TorchDispatchMode):
    """A mode that lists (dtype of the incoming gradient, dtype of the softmax's input) of each softmax backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax_backward_data.default:
            self.seen.append((args[0].dtype, args[3]))
        return func(*args, **(kwargs or {}))


def test_softmax_of_attention_dropout_under_autocast_has_one_dtype() -> None:
    # CUDA has no kernel for two dtypes.
    q = torch.randn(ROWS, HEADS, LENGTH, 4, requires_grad=True)
    with SoftmaxDtypes() as dtypes, KeyedDropout(nn.Module(), 0).step(0, range(ROWS)):
        with torch.autocast("cpu", torch.bfloat16):
            heads = q @ torch.eye(4)
            attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        attended.sum().backward()

    assert dtypes.seen == [(torch.float32, torch.float32)]


def test_the_triton_kernel_makes_the_same_masks_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter runs the kernel here; `nbkit selftest` runs it on a GPU.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="there is no Triton beside a torch that is built for the CPU")
    from nbkit.rank.rng import mask_kernel

    for shape in ((5,), (7, 33), (3, 17, 65), (2, 3, 9, 130)):
        places = [torch.randperm(3 * n)[:n].to(torch.int32) for n in shape]
        made = mask_kernel.dropped((-5, 1 << 30), places, -(1 << 30))
        key = (1 << 62) | (-5 & 0xFFFFFFFF)
        assert made is not None and torch.equal(made, dropped(key, places, 0.25))


def mask(*key: int, shape: tuple[int, ...] = (16, 64, 128), p: float = 0.5, first: int = 0) -> Tensor:
    rows = torch.arange(first, first + shape[0])
    return dropped(key_of(*key), coordinates(shape, rows), p).view(shape)


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation of bits, in standard deviations for independent bits."""
    a, b = a.double().flatten() - 0.5, b.double().flatten() - 0.5
    return float((a * b).mean() * 4) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_requested_fraction_is_dropped_in_every_row_line_and_column(p: float) -> None:
    one = mask(3, 5, p=p).double()

    assert abs(one.mean() - p) < 4 * math.sqrt(p * (1 - p) / one.numel())
    for dims in ((0, 1), (0, 2), (1, 2), (2,), (1,), (0,)):
        over = math.prod(one.shape[d] for d in dims)
        scores = (one.mean(dims) - p) / math.sqrt(p * (1 - p) / over)
        assert 0.8 < scores.var() < 1.2 or scores.numel() < 200
        assert scores.abs().max() < 5.5


def test_masks_of_neighbours_are_not_correlated() -> None:
    one = mask(3, 5)
    others = {
        "step": mask(4, 5),
        "layer": mask(3, 6),
        "swapped": mask(5, 3),
        "sample": mask(3, 5, first=16),
        "next sample": one.roll(1, 0),
        "next line": one.roll(1, 1),
        "next element": one.roll(1, 2),
        "far element": one.roll(64, 2),
        "diagonal": one.roll((1, 1), (1, 2)),
        "transposed": mask(3, 5, shape=(16, 128, 64)).mT,
    }
    for what, other in others.items():
        assert abs(correlation(one, other)) < 4.5, what
    a, b, c = one, one.roll(1, 2), one.roll(2, 2)
    assert abs(correlation(a ^ b, c)) < 4.5
    # Over 256 consecutive keys, the bit of one element is as random as a coin.
    coin = torch.stack([mask(k, shape=(8, 8, 8)) for k in range(256)]).double().mean(0)
    assert ((coin - 0.5) * 2 * 16).abs().max() < 5


def test_the_bits_equal_the_published_hash() -> None:
    """Compare with the hash in Python's unlimited integers, so that it is the same on every device."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    def bit(key: int, place: tuple[int, ...]) -> bool:
        low, high = key & 0xFFFFFFFF, key >> 32
        salted = [
            mix((x * 0x9E3779B9 & 0xFFFFFFFF) + (high ^ (dim * 0x2545F491 & 0x7FFFFFFF)) & 0xFFFFFFFF)
            for dim, x in enumerate(place)
        ]
        line = mix(salted[0] ^ low)
        for other in salted[1:-1]:
            line = mix(line ^ other)
        last = line ^ salted[-1]
        last = (last ^ last >> 16) * 0x7FEB352D & 0xFFFFFFFF
        last = (last ^ last >> 15) * 0x846CA68B & 0xFFFFFFFF
        return (last ^ 0x80000000) < round(0.3 * 2**32)

    key = key_of(11, 12, 13)
    assert key_of(11, 12) != key_of(12, 11) and 0 <= key < 2**64
    rows = torch.tensor([3, 100_000])
    found = dropped(key, coordinates((2, 3, 2, 5), rows), 0.3)
    for b, row in enumerate(rows.tolist()):
        for i in range(3):
            for j in range(2):
                assert found[b, i, j].tolist() == [bit(key, (row, i, j, k)) for k in range(5)]
    # This tensor has more lines than one piece of work takes.
    big = mask(1, shape=(3, 1500, 1024), p=0.2)
    assert torch.equal(big[2:, 1000:1001], mask(1, shape=(1, 1001, 1024), p=0.2, first=2)[:, 1000:])
