"""Test that losses and models that couple the rows of a batch are detected, in any precision and size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import mean_loss, net, points, weighted_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from nbkit.rank.data.sample_rows import Sample, sample_of
from nbkit.rank.loss.loss_check import examine
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_trial import differing_pairs, spread_rows
from nbkit.rank.parallel.model_facts import Coupled

BATCH = default_collate(points(16))


def of(loss: Any, batch: Any = BATCH, model: nn.Module | None = None) -> Coupled | None:
    torch.manual_seed(0)
    model = net(dropout=0.1) if model is None else model
    return examine(model, model, loss, Sample(batch), None).coupled


def says(loss: Any, batch: Any = BATCH, model: nn.Module | None = None) -> str:
    found = of(loss, batch, model)
    return "" if found is None else f"{found.what} {found.numbers} {found.hint}"


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.T, torch.arange(len(output)))


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    total, weight = weighted_loss(output, target)
    return total / weight


def spread(output: Tensor, target: Tensor) -> Tensor:
    return mean_loss(output, target) + 1e-3 * output.mean(0).square().sum()


@pytest.mark.long
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masked_means_are_detected_and_means_and_weighted_sums_are_not(dtype: torch.dtype, size: float) -> None:
    batch = [BATCH[0].to(dtype), BATCH[1]]

    def sized(output: Tensor, target: Tensor) -> Tensor:
        # transformers casts the logits too, and so does autocast.
        return mean_loss(output.float(), target) * size

    def near(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.double(), output.detach().double() + size)

    for loss in (sized, near, mean_loss, weighted_loss):
        assert says(loss, batch, net(0.1).to(dtype)) == "", loss
    assert "(loss.sum(), mask.sum())" in says(lambda o, t: masked_mean(o.float(), t) * size, batch, net(0.1).to(dtype))


def test_a_loss_that_couples_rows_is_reported_with_numbers_and_a_fix() -> None:
    assert "16 rows" in says(contrastive) and "contrastive" in says(contrastive)
    assert "return loss.sum(), len(target)" in says(lambda out, target: out.square().sum())
    assert "contrastive" in says(spread)
    assert "(loss * mask).sum(), mask.sum()" in says(lambda out, target: (mean_loss(out, target), 1))


def test_a_loss_that_cannot_be_judged_is_not_reported() -> None:
    assert says(lambda out, target: mean_loss(out, target) * torch.rand(())) == ""
    assert says(lambda out, target: out.log().sum()) == says(lambda out, target: 1 / 0) == ""
    assert says(lambda out, target: (out.sum(), torch.tensor(float("nan")))) == ""
    assert says(contrastive, default_collate(points(1))) == ""
    assert says(lambda out, target: mean_loss(out.bfloat16(), target)) == ""


class Noisy(nn.Module):
    """A model that draws random numbers, so only its loss is checked. always: in evaluation too."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.inner, self.always = net(), always

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.randn_like(x) * (self.training or self.always))


@pytest.mark.parametrize("always", [False, True])
def test_only_the_loss_is_checked_if_the_model_draws_random_numbers(always: bool) -> None:
    assert says(mean_loss, model=Noisy(always)) == ""
    assert "len(target)" in says(lambda out, target: out.square().sum(), model=Noisy(always))


class Centred(nn.Module):
    """A model that subtracts the mean of all rows from each row, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.tanh(x - x.mean(0) if self.training else x))


def test_a_model_that_mixes_rows_in_training_is_detected_with_a_zero_head() -> None:
    model = nn.Sequential(nn.Tanh(), Centred())
    said = says(mean_loss, model=model)

    assert "The model mixes the rows of a batch: the output of '1' for one row depends on the other rows" in said
    assert not model[1].last.weight.any()


class _Balance(torch.autograd.Function):
    """A function that returns its first argument. Its backward gives the second one a gradient too."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, balance: Tensor) -> Tensor:
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones(())


class Balanced(nn.Module):
    """A model whose load-balancing term is only in the gradient, as in some models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(_Balance.apply(torch.tanh(x), 0.01 * x.softmax(-1).mean(0).square().sum()))


def test_a_term_that_is_only_in_the_gradient_is_detected() -> None:
    assert "their gradients differ" in says(mean_loss, model=Balanced())


def test_the_chosen_rows_differ() -> None:
    labels = torch.full((40, 8), 3)
    labels[17, 2:] = -100
    classes = torch.zeros(40, dtype=torch.long)
    classes[31] = 5

    assert differing_pairs([torch.zeros(40, 4), labels], 40)[0] == (0, 17)
    assert differing_pairs([torch.zeros(40, 4), classes], 40) == [(0, 31)]
    assert differing_pairs([torch.zeros(40, 4), torch.zeros(40)], 40) == [(0, 1)]
    assert {0, 31} <= set(spread_rows([torch.zeros(40, 4), classes], 40, 16))
    assert len(spread_rows([torch.zeros(40, 4), classes], 40, 16)) == 16
    entries = [torch.zeros(40, 4), [torch.zeros(1 + (i == 9)) for i in range(40)]]
    assert differing_pairs(entries, 40) == [(0, 9)]


def test_rows_are_read_from_all_over_the_data() -> None:
    read: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            read.append(i)
            return torch.zeros(2), torch.tensor(i)

    sample = sample_of(Data(), default_collate)

    assert sample is not None and sample.rows == len(read) <= 64
    assert read[:2] == [0, 1] and max(read) > 900 and len(set(read)) == len(read)
    assert sample_of([], default_collate) is None


def test_outputs_are_split_by_name_and_put_together_again() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    output = {"a": [torch.zeros(1), (torch.ones(2),)], "b": CausalLMOutput(loss=torch.zeros(()), logits=torch.ones(3))}
    names = ["a.0", "a.1.0", "b.loss", "b.logits"]
    assert list(leaves(output)) == names and leaves(torch.zeros(2)).keys() == {""}

    other = with_leaves(output, lambda name, tensor: tensor + names.index(name))
    assert [float(tensor.sum()) for tensor in leaves(other).values()] == [0, 4, 2, 12]
    assert isinstance(other["b"], CausalLMOutput) and float(other["b"].loss) == 2 and other["b"][1] is other["b"].logits
    assert float(output["b"].loss) == 0  # type: ignore[attr-defined]


class Told(nn.Module):
    """A float32 model that returns its loss: cross entropy plus `size` times a term over the whole batch."""

    def __init__(self, size: float, cast: bool) -> None:
        super().__init__()
        self.inner, self.size, self.cast = nn.Linear(6, 5), size, cast

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x).float() if self.cast else self.inner(x)
        return {"loss": F.cross_entropy(logits, labels) + self.size * logits.mean(0).square().sum(), "logits": logits}


@pytest.mark.parametrize(("size", "cast", "told"), [(0, False, ""), (1e-6, False, "no mean"), (0, True, ""),
                                                    (1e-3, True, "no mean")])  # fmt: skip
def test_a_loss_inside_a_model_is_checked_in_float64_and_the_model_is_unchanged(
    size: float, cast: bool, told: str
) -> None:
    torch.manual_seed(0)
    model = Told(size, cast)
    held = [(p, p.data_ptr(), p.dtype) for p in model.parameters()]
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(5, (8,))}
    found = examine(model, lambda value: model(**value), lambda o, _: o["loss"], Sample(batch), ["x", "labels"])

    assert told in (found.coupled.what if found.coupled is not None else "") and bool(told) == bool(found.coupled)
    assert [(p, p.data_ptr(), p.dtype) for p in model.parameters()] == held
