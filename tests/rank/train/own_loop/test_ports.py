"""Test that ports of programs equal their plain versions in one process, with at most six changed lines."""

from __future__ import annotations

from typing import Any

import language_programs
import pytest
import torch
from language_programs import PORTS as LANGUAGE_PORTS
from language_programs import copied
from own_programs import PORTS, changed
from ranks import run_ranks
from torch import Tensor, nn

import nbkit

CHAINS = ["ddp", "zero3", "dp=1 tp=2", "ddp > zero3 > dp=1 tp=2 > zero1"]


def run(world: Any, name: str, chains: list[str]) -> list[list[dict[str, Tensor]]]:
    """Return the weights of a program's models for each chain of strategies, with live switches every two steps."""
    _, program, loader, widths = PORTS[name]
    found = []
    for chain in chains:
        first, *later = chain.split(" > ")
        given = iter(widths)

        def prepare(model: nn.Module, opt: Any, first: str = first, later: Any = later, given: Any = given) -> Any:
            x = tuple(torch.randn(*((4, n) if n else (4,)), dtype=torch.float64) for n in next(given))
            return nbkit.prepare(
                model,
                opt,
                strategy=first,
                switches=dict(zip((1, 3, 5), later, strict=False)),
                hints=nbkit.ModelHints(example=(x if len(x) > 1 else x[0], x[0])),
                log_dir=None,
            )

        jobs = program(loader, prepare)
        found.append([job.full_state_dict() for job in jobs] + [len(job.switches) for job in jobs])
    return found


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("name", PORTS)
def test_a_port_equals_the_plain_program_under_every_strategy_and_switch(name: str) -> None:
    plain, program, loader, _ = PORTS[name]
    assert changed(plain, program) <= 6
    models = plain(loader, None)
    for rank in run_ranks(run, 2, name, CHAINS, timeout=120):
        for chain, states in zip(CHAINS, rank, strict=True):
            assert states[len(models) :] == [chain.count(">")] * len(models)
            for model, state in zip(models, states, strict=False):
                for key, value in model.state_dict().items():
                    torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11, msg=f"{chain} {key}")


LANGUAGE_CHAINS = ["zero3", "ddp > zero1 > dp=1 tp=2 > zero3"]


def run_language(world: Any, name: str) -> list[list[Any]]:
    _, program, loader = LANGUAGE_PORTS[name]
    found = []
    for chain in LANGUAGE_CHAINS:
        first, *later = chain.split(" > ")
        batch = copied(loader)[0]
        example = (tuple(batch), batch[1]) if isinstance(batch, list) else batch
        if name == "torchtitan":
            example = batch[0], batch[1]
        if isinstance(example, dict):
            example = ({key: value for key, value in example.items() if key != "labels"}, example["labels"])

        def prepare(model: nn.Module, opt: Any, first: str = first, later: Any = later, example: Any = example) -> Any:
            switches = dict(zip((2, 4, 6), later, strict=False))
            hints = nbkit.ModelHints(example=example)
            return nbkit.prepare(model, opt, strategy=first, switches=switches, hints=hints, log_dir=None)

        (job,) = program(copied(loader), prepare)
        found.append([job.full_state_dict(), len(job.switches)])
    return found


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("name", LANGUAGE_PORTS)
def test_a_language_model_loop_needs_six_changed_lines_for_live_switches(name: str) -> None:
    plain, program, loader = LANGUAGE_PORTS[name]
    assert changed(plain, program) <= 6
    (model,) = plain(copied(loader), None)
    for rank in run_ranks(run_language, 2, name, timeout=600):
        for chain, (state, switches) in zip(LANGUAGE_CHAINS, rank, strict=True):
            assert switches == chain.count(">")
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11, msg=f"{chain} {key}")


def with_half_embedding(world: Any) -> list[list[Any]]:
    language_programs.embedding = torch.bfloat16
    return run_language(world, "nanochat")


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
def test_a_16_bit_embedding_with_larger_weights_trains_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Allow for rounding: ranks round their parts of its gradient before the sum. Everything else is float64."""
    monkeypatch.setattr(language_programs, "embedding", torch.bfloat16)
    plain, _, loader = LANGUAGE_PORTS["nanochat"]
    (model,) = plain(copied(loader), None)
    for rank in run_ranks(with_half_embedding, 2, timeout=600):
        for state, _ in rank:
            for key, value in model.state_dict().items():
                assert state[key].dtype == value.dtype
                far = (state[key].double() - value.double()).norm() / value.double().norm()
                assert far < 0.02, key
