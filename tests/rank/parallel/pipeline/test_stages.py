"""Test that stages of unmodified models, chained in one process, give the outputs and gradients of the whole model."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from staging import assert_equal, chained, partitions, staged
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbkit.errors import StrategyError
from nbkit.rank.data.batch import call
from nbkit.rank.models.gpt import Block
from nbkit.rank.parallel.pipeline import partial_forward
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.proof.observe import tensors_in
from nbkit.rank.parallel.proof.unchanged import plain_attention
from verify.models.specimens import LENGTH, WIDTH, ZOO, Specimen, gpt, hf_gpt2, hf_llama, next_tokens


# ten_convs has many small layers, and test_ten_convolutions_can_be_cut_into_five_stages_of_two tests the same model.
@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n == "ten_convs" else n for n in ZOO])
def test_every_partition_of_every_model_equals_the_whole(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.build(torch.float64)
    value, target = specimen.batch(3, dtype=torch.float64)
    chain = find_chain(model, lambda: call(model, value))
    assert chain.blocks == specimen.blocks
    whole = specimen.gradients(model, value, target)
    parts = {(lo, hi): staged(model, chain, [(lo, hi)]) for lo, hi in combinations(range(len(chain) + 1), 2)}
    for num in (1, 2, 3, 4):
        # A chain of many blocks has hundreds of partitions: test every fifth.
        for ranges in list(partitions(len(chain), num))[:: 1 if len(chain) < 6 else 5]:
            assert_equal(chained([(parts[r], 0) for r in ranges], specimen, value, target), whole)
            # Each parameter is on one stage, except a weight that embedding and head share.
            held = sorted(name for r in ranges for name in parts[r].holds)
            tied = [name for name in chain.before if name in chain.after] * (num > 1)
            assert held == sorted([*whole[1], *tied])


@pytest.mark.parametrize("name", ["gpt2_padded", "llama_tied", "encoder", "pairs", "ten_convs"])
def test_several_stages_on_a_rank_are_right_with_other_shapes_and_in_evaluation(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.build(torch.float64)
    chain = find_chain(model, lambda: call(model, specimen.batch(3, dtype=torch.float64)[0]))
    n = len(chain)
    outer, inner = staged(model, chain, [(0, 1), (3, n)]), staged(model, chain, [(1, 2), (2, 3)])
    order = [(outer, 0), (inner, 0), (inner, 1), (outer, 1)]
    for rows in (3, 2, 5):
        value, target = specimen.batch(rows, seed=rows, dtype=torch.float64)
        assert_equal(chained(order, specimen, value, target), specimen.gradients(model, value, target))
    for part in (model, outer.module, inner.module):
        part.eval()
    with torch.no_grad():
        sent: Any = ()
        for part, index in order:
            sent = part.forward(index, value, sent)
        with plain_attention():  # torch's fast path clears padding, and the layers alone do not
            expected = call(model, value)
    for a, b in zip(tensors_in(sent), tensors_in(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_ten_convolutions_can_be_cut_into_five_stages_of_two() -> None:
    specimen = ZOO["ten_convs"]
    model = specimen.build(torch.float64)
    value, target = specimen.batch(4, dtype=torch.float64)
    chain = find_chain(model, lambda: model(value))
    ranges = [(i, i + 2) for i in range(0, 10, 2)]
    parts = [staged(model, chain, [r]) for r in ranges]
    assert_equal(
        chained([(part, 0) for part in parts], specimen, value, target), specimen.gradients(model, value, target)
    )
    for i, part in enumerate(parts):
        convs = {int(name.split(".")[1]) for name in part.holds if name.startswith("convs")}
        assert convs == {2 * i, 2 * i + 1}


def test_a_stage_with_all_blocks_is_the_unmodified_model() -> None:
    model = gpt()
    chain = find_chain(model, lambda: model(next_tokens(2, torch.Generator())[0]))
    before = {name: type(part) for name, part in model.named_modules()}
    whole = Staged(model, chain, [(0, 4)])
    assert before == {name: type(part) for name, part in model.named_modules()}
    assert whole.holds == {name for name, _ in model.named_parameters()}


def test_gated_modules_keep_their_classes_and_names() -> None:
    model = gpt()
    chain = find_chain(model, lambda: model(next_tokens(2, torch.Generator())[0]))
    assert all(type(block) is Block for block in model.blocks)
    part = staged(model, chain, [(1, 3)])
    assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in part.module.blocks)
    assert {name.split(".")[1] for name, _ in part.module.named_parameters()} == {"1", "2"}
    head = part.module.head.weight
    assert (head.shape, head.dtype, head.new_zeros(2).tolist()) == (model.head.weight.shape, torch.float32, [0.0, 0.0])
    up = part.module.blocks[0].up.weight
    for use in (
        lambda: head * torch.ones(()),
        lambda: float(up.norm()),
        lambda: head.data.mul_(2).tolist(),
        lambda: up.detach().cpu().numpy(),
        lambda: (head * 2).sum() + torch.ones(()),
        lambda: torch._foreach_add_([head], [torch.ones(())]),
    ):
        with pytest.raises(
            StrategyError, match=r"uses the parameter '(head|blocks\.0\.up)\.weight', but does not hold it"
        ):
            use()


def test_a_stage_makes_no_cache_of_keys_and_values() -> None:
    model = hf_gpt2(use_cache=True).eval()
    ids = next_tokens(2, torch.Generator())[0]
    chain = find_chain(model, lambda: model(ids))
    with torch.no_grad():
        output = staged(model, chain, [(2, 4)]).forward(0, ids, (torch.randn(2, LENGTH, WIDTH),))
    assert output.past_key_values is None and model(ids).past_key_values is not None


def test_lora_on_a_llama_trains_only_its_adapters_through_frozen_stages() -> None:
    from peft import LoraConfig, get_peft_model

    def lora() -> nn.Module:
        model = get_peft_model(hf_llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_()
        return model

    specimen = Specimen(
        lora, lambda rows, draw: ({"input_ids": (t := next_tokens(rows, draw))[0]}, t[1]), ZOO["llama"].loss, ()
    )
    model = specimen.build(torch.float64)
    value, target = specimen.batch(3)
    chain = find_chain(model, lambda: call(model, value))
    assert len(chain) == 4
    parts = [staged(model, chain, [r]) for r in ((0, 1), (1, 3), (3, 4))]
    found = chained([(part, 0) for part in parts], specimen, value, target)
    whole = specimen.gradients(model, value, target)
    assert_equal(found, whole)
    assert len(found[1]) == 16 and all("lora" in name for name in found[1])


def test_recomputed_and_frozen_blocks_have_the_same_gradients() -> None:
    specimen = ZOO["gpt"]
    model = specimen.build(torch.float64)
    model.tokens.requires_grad_(False)
    model.positions.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    value, target = specimen.batch(3)
    chain = find_chain(model, lambda: model(value))
    parts = [staged(model, chain, [r]) for r in ((0, 1), (1, 3), (3, 4))]
    for part in parts:
        for block in part.module.blocks:

            def again(*args: Any, run: Any = block.forward) -> Any:
                return checkpoint(run, *args, use_reentrant=False)

            block.forward = again
    assert_equal(
        chained([(part, 0) for part in parts], specimen, value, target), specimen.gradients(model, value, target)
    )


def test_outputs_of_skipped_modules_share_memory_until_they_are_written() -> None:
    zeros = partial_forward._Zeros()
    asked = torch.Size([2, 3]), torch.float32, torch.device("cpu")
    first, second = zeros.like(*asked), zeros.like(*asked)
    assert first.data_ptr() == second.data_ptr() and not first.any()
    second[0].add_(1)
    third = zeros.like(*asked)
    assert not third.any() and third.data_ptr() != first.data_ptr()
    with torch.inference_mode():
        zeros.like(*asked).add_(1)
        assert not zeros.like(*asked).any()
    assert not zeros.like(*asked).requires_grad_().any() and not zeros.like(*asked).requires_grad
