"""Test that a few exchanges of experts balance the tokens of ranks, and that a strategy says where experts are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from nbkit.errors import StrategyError
from nbkit.planner.expert_places import evened, exchanged, most_tokens, moved_experts
from nbkit.rank.train.control.rebalance import better_places, seconds_of_a_token
from nbkit.strategy import Strategy
from nbkit.techniques.experts import experts_of, moved_to

HOME = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("seed", range(20))
def test_exchanges_between_two_ranks_are_near_the_best_assignment(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [round(100 / (place + 1) ** draw.uniform(0.3, 1.5)) for place in range(8)]
    draw.shuffle(tokens)

    found = exchanged(tokens, HOME)

    assert [len(own) for own in found] == [4, 4] and sorted([*found[0], *found[1]]) == list(range(8))
    best = min(max(part, sum(tokens) - part) for part in (sum(some) for some in combinations(tokens, 4)))
    assert max(sum(tokens[n] for n in own) for own in found) <= 1.05 * best


def test_few_exchanges_balance_many_experts() -> None:
    draw = random.Random(3)
    tokens = [round(1000 / (place + 1) ** 0.4) + draw.randint(0, 30) for place in range(64)]
    home = [list(range(8 * rank, 8 * rank + 8)) for rank in range(8)]

    found = exchanged(tokens, home)

    assert max(sum(tokens[n] for n in own) for own in found) <= 1.05 * sum(tokens) / 8
    assert sum(len({*new} - {*old}) for new, old in zip(found, home, strict=True)) <= 24
    assert exchanged([5] * 64, home) == home


def test_each_layer_is_balanced_separately_and_ranks_keep_their_number_of_experts() -> None:
    now = Strategy.parse("ep=2", 2)
    tokens = [[30, 30, 10, 10], [10, 10, 30, 30], [9, 1, 1, 1, 2]]

    new = evened(now, tokens)

    # The most popular expert of the last layer goes to the rank with fewer experts.
    assert str(new) == "dp=2 ep=2 experts=0:0-2+1:0-2+2:0-4"
    assert most_tokens(now, tokens) == 60 + 60 + 11 and most_tokens(new, tokens) == 40 + 40 + 10
    assert moved_experts(now, new, tokens) == 6
    # With these tokens, the experts of layer 1 return to their first rank.
    assert str(evened(new, [tokens[0], [20, 20, 10, 25], tokens[2]])) == "dp=2 ep=2 experts=0:0-2+2:0-4"


@pytest.mark.parametrize("seed", range(10))
def test_a_strategy_says_which_experts_each_rank_holds(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    count = draw.randint(ranks, 12)
    every = draw.sample(range(count), count)
    sizes = [len(experts_of((), 0, count, ranks, index)) for index in range(ranks)]
    held = [tuple(sorted(every[sum(sizes[:i]) : sum(sizes[: i + 1])])) for i in range(ranks)]

    strategy = Strategy(ranks, ep=ranks, experts=moved_to({1: held}))

    assert Strategy.parse(str(strategy), ranks) == strategy
    assert [experts_of(strategy.experts, 1, count, ranks, index) for index in range(ranks)] == held
    assert [n for index in range(ranks) for n in experts_of(strategy.experts, 0, count, ranks, index)] == [
        *range(count)
    ]
    at_home = sum(len({*own} & {*experts_of((), 1, count, ranks, i)}) for i, own in enumerate(held))
    assert sum(len(cycle) for _, cycles in strategy.experts for cycle in cycles) == count - at_home


def test_places_of_experts_have_one_spelling() -> None:
    strategy = Strategy.parse("zero3 ep=2 experts=3:4-0+0:7-2,5-1", 4)

    assert str(strategy) == "dp=4 zero=3 ep=2 experts=0:1-5,2-7+3:0-4"
    assert strategy.composed == Strategy.parse("zero3 ep=2", 4)
    assert Strategy.parse("ep=2 experts=0:3", 4) == Strategy.parse("ep=2", 4)
    assert Strategy.parse("ddp experts=0:1-5", 4).without_effect == ("experts=0:1-5 has no effect because ep is 1",)
    for text in ("0", "0:", "0:1-", "0:1-5,5-2", "0:1-01", "0:1-5+0:2-7", "a:1-5", "1-5"):
        with pytest.raises(StrategyError, match="experts=0:1-5,2-7"):
            Strategy.parse(f"ep=2 experts={text}", 4)


def test_experts_are_exchanged_only_if_that_saves_enough_of_a_step() -> None:
    now, skewed, even = Strategy.parse("ep=2", 2), [[30, 30, 10, 10]], [[20, 20, 20, 20]]

    found = better_places(now, skewed, skewed, 0.01, 1.4)
    assert found is not None and str(found[0]) == "dp=2 ep=2 experts=0:0-2"
    # The rank with 60 tokens computes 1.6 s; each of two with 40 would compute 1.4 s.
    assert found[1:] == pytest.approx((0.2, 0.2 / 1.6))
    # No exchange: the next step has even tokens; a token takes no time; or the rest of the step takes much longer.
    assert better_places(now, skewed, even, 0.01, 1.4) is None
    assert better_places(now, skewed, skewed, 0.0, 1.4) is None
    assert better_places(now, skewed, skewed, 0.01, 9.0) is None


def test_the_seconds_of_a_token_come_from_ranks_that_differ_in_tokens() -> None:
    # Both ranks compute equally many tokens, but not in the same layer. Layers and groups differ in their base time.
    tokens = [[10.0, 30.0], [30.0, 10.0], [20.0, 25.0], [20.0, 15.0]]
    slow = [
        [own + layer + 0.01 * n for layer, n in enumerate(row)] for own, row in zip((1, 1, 5, 5), tokens, strict=True)
    ]

    assert seconds_of_a_token(tokens, slow, [(0, 1), (2, 3)]) == pytest.approx(0.01)
    assert seconds_of_a_token(tokens, slow[::-1], [(0, 1)]) == 0
    assert seconds_of_a_token([[20.0]] * 4, [[1.0]] * 4, [(0, 1, 2, 3)]) == 0
