"""Test that ranks draw different random numbers, as under torchrun, until the user seeds them."""

from __future__ import annotations

from nbkit import Cluster

DRAWN = "import random, numpy\n(torch.rand(4).tolist(), numpy.random.rand(4).tolist(), random.random())"


def test_every_rank_draws_different_numbers(two: Cluster) -> None:
    drawn = two.run(DRAWN).values

    assert all(mine != others for mine, others in zip(drawn[0], drawn[1], strict=True))


def test_samplers_and_dropout_of_ranks_differ(two: Cluster) -> None:
    found = two.run(
        "order = list(torch.utils.data.RandomSampler(range(64)))\n"
        "(order, torch.nn.functional.dropout(torch.ones(64)).tolist(), torch.initial_seed())"
    ).values

    assert all(mine != others for mine, others in zip(found[0], found[1], strict=True))


def test_ranks_with_the_same_seed_draw_the_same_numbers(two: Cluster) -> None:
    drawn = two.run(f"import random, numpy\ntorch.manual_seed(0); numpy.random.seed(0); random.seed(0)\n{DRAWN}").values

    assert drawn[0] == drawn[1]


def test_a_trainer_starts_all_ranks_with_equal_weights_from_a_model_or_a_function(two: Cluster) -> None:
    weights = two.run(
        "import numpy\n"
        "def build():\n"
        "    module = torch.nn.Linear(4, 4)\n"
        "    module.weight.data += torch.as_tensor(numpy.random.rand(4, 4)).float()\n"
        "    return module\n"
        "torch.manual_seed(0)\n"
        "data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]\n"
        "torch.seed()\n"
        "def begun(model, strategy):\n"
        "    trainer = nbkit.Trainer(model=model, loss=torch.nn.functional.mse_loss, data=data, batch_size=4,\n"
        "        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), log_dir=None, progress=False,\n"
        "        strategy=strategy)\n"
        "    return trainer.full_state_dict()['weight'].tolist()\n"
        "built = build()\n"
        "own = built.weight.tolist()\n"
        "own, begun(built, 'zero3'), begun(build, 'ddp')"
    ).values

    assert weights[0][0] != weights[1][0]
    assert weights[0][1] == weights[1][1] == weights[0][0]
    assert weights[0][2] == weights[1][2]
