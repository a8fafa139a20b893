"""Test that a Hugging Face directory trains under every strategy, and each rank reads only its part."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.models import pretrained
from nbkit.rank.train.trainer import Trainer
from verify.models.specimens import hf_gpt2, hf_llama, next_tokens, object_cross_entropy

pytestmark = pytest.mark.usefixtures("rows_are_known")

CASES = [("llama", "zero3"), ("llama", "pp microbatches=2"), ("gpt2", "tp")]
ALSO = [("llama", "ddp"), ("gpt2", "pp microbatches=2")]


def saved(world: Any, folder: Path) -> None:
    torch.manual_seed(0)
    # A base model saves names without its prefix, and no output matrix, because this is the embedding.
    hf_gpt2(2).transformer.save_pretrained(folder / "gpt2")
    hf_llama(2).save_pretrained(folder / "llama", max_shard_size="20KB")
    config = json.loads((folder / "gpt2" / "config.json").read_text())
    (folder / "gpt2" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))


def whole(folder: Path) -> nn.Module:
    import transformers

    kind = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}[folder.name]
    return kind.from_pretrained(folder)


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trainer(model: Any, strategy: str = "ddp", optimizer: Any = adamw) -> Trainer:
    ids, target = next_tokens(16, torch.Generator().manual_seed(4))
    data = [({"input_ids": x}, y) for x, y in zip(ids, target, strict=True)]
    return Trainer(
        model=model, loss=object_cross_entropy, optimizer=optimizer,
        data=data, batch_size=8, strategy=strategy, log_dir=None, progress=False,
    )  # fmt: skip


def losses(made: Trainer) -> list[float]:
    made.fit(2)
    return [record["loss"] for record in made.history]


def trained(world: Any, folder: Path, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    expected = {name: (whole(folder / name).state_dict(), trainer(whole(folder / name))) for name in ("gpt2", "llama")}
    plain = {name: (state, losses(made)) for name, (state, made) in expected.items()}
    read, found = pretrained._Files.read, []
    for name, strategy in cases:
        sizes: list[int] = []

        def counted(files: Any, key: str, part: Any, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append((tensor := read(files, key, part)).numel())
            return tensor

        pretrained._Files.read = counted  # type: ignore[method-assign]
        made = trainer(nbkit.from_pretrained(folder / name), strategy)
        state = made.full_state_dict()
        found.append(
            {
                "case": (name, strategy),
                "same": list(state) == list(plain[name][0])
                and all(torch.equal(state[key], value) for key, value in plain[name][0].items()),
                "read": sum(sizes),
                "held": sum(layout.numel for _, layout in made.job.sharded_model.data.weights.values()),
                "all": sum(p.numel() for p in made.job.builder.skeleton.parameters()),
                "largest": max(sizes),
                "losses": (losses(made), plain[name][1]),
            }
        )
    return found


@pytest.mark.parametrize("cases", [CASES, pytest.param(ALSO, marks=pytest.mark.long)])
def test_each_rank_reads_only_its_part_and_trains_as_the_model_loaded_whole(
    tmp_path: Path, cases: list[tuple[str, str]]
) -> None:
    run_ranks(saved, 1, tmp_path, timeout=120)
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()

    for found in run_ranks(trained, 2, tmp_path, cases, timeout=240):
        for one in found:
            assert one["same"] and one["read"] == one["held"], one
            assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-4), one
        parted = [one for one in found if one["case"][1] != "ddp"]
        assert all(one["read"] < 0.8 * one["all"] for one in parted)
        for one in parted:
            if one["case"][1] == "zero3":
                assert one["read"] == one["all"] // 2 and one["largest"] <= 96 * 32 // 2


def adapted(world: Any, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nbkit.from_pretrained(folder / "llama", adapt=lora, attention_dropout=0.25)
    shell = model.build(seed=0, device=torch.device("cpu"))
    windows = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in shell.module.parameters()}
    made = trainer(model, "zero3")
    state = made.full_state_dict()
    base = whole(folder / "llama").state_dict()
    errors = []
    for directory, overrides in (
        (folder, {}),
        (folder / "llama", {"num_hidden_layers": 3}),
        (folder / "gpt2", {"n_embd": 8}),
    ):
        with pytest.raises(TrainingError) as raised:
            trainer(nbkit.from_pretrained(directory, **overrides))
        errors.append(str(raised.value))
    return {
        "memory": sum(windows.values()) / sum(4 * value.numel() for value in base.values()),
        "same": all(
            torch.equal(value, state[f"base_model.model.{key}"])
            for key, value in base.items()
            if f"base_model.model.{key}" in state
        ),
        "split": torch.equal(
            base["model.layers.1.self_attn.q_proj.weight"],
            state["base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"],
        ),
        "zero": all(not value.any() for key, value in state.items() if "lora_B" in key),
        "drawn": {key: value for key, value in state.items() if "lora_A" in key},
        "dropout": made.job.builder.skeleton.config.attention_dropout,
        "steps": len(losses(made)),
        "errors": errors,
    }


def _by_weights(world: Any, folder: Path) -> list[str]:
    """Return the errors of optimizers whose factory reads weights, changes them, or uses only shapes."""

    def by_norm(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * float(p.detach().norm())} for p in model.parameters()])

    def changing(model: nn.Module) -> torch.optim.Optimizer:
        nn.init.zeros_(model.lm_head.weight)  # type: ignore[union-attr, arg-type]
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def by_shape(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1 and torch.zeros_like(p).numel()]
        return torch.optim.SGD(
            [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2]}], lr=0.1
        )

    said = []
    for factory in (by_norm, changing, by_shape):
        try:
            trainer(nbkit.from_pretrained(folder / "llama"), optimizer=factory)
        except TrainingError as error:
            said.append(str(error))
    return said


def test_an_optimizer_that_reads_or_changes_unloaded_weights_is_refused(tmp_path: Path) -> None:
    run_ranks(saved, 1, tmp_path, timeout=120)
    reads, changes = run_ranks(_by_weights, 1, tmp_path, timeout=240)[0]
    assert reads.startswith("optimizer= reads 'model.embed_tokens.weight'") and "norm" in reads
    assert changes.startswith("optimizer= changes 'lm_head.weight'")


def test_adapters_work_on_unloaded_models_and_bad_files_are_refused(tmp_path: Path) -> None:
    run_ranks(saved, 1, tmp_path, timeout=120)
    found = run_ranks(adapted, 2, tmp_path, timeout=240)

    for one in found:
        assert one["memory"] < 1 / 3 and one["same"] and one["split"] and one["zero"]
        assert one["dropout"] == 0.25 and one["steps"] == 2
        assert len(one["drawn"]) == 4 and all(value.std() > 0.01 for value in one["drawn"].values())
        assert "no config.json" in one["errors"][0]
        assert "missing, first ['model.layers.2" in one["errors"][1]
        assert "there, " in one["errors"][2] and "n_embd" not in one["errors"][2]
    assert all(torch.equal(found[0]["drawn"][key], found[1]["drawn"][key]) for key in found[0]["drawn"])


def from_elsewhere(world: Any, folder: Path) -> list[str]:
    """Return the errors for directories that would run code or read other files. Each is a good one with a change."""
    config = json.loads((folder / "llama" / "config.json").read_text())
    index = json.loads((folder / "llama" / "model.safetensors.index.json").read_text())
    code = f"import os; os.mkdir({str(folder / 'canary')!r})\nclass Config: ...\n"
    auto = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Config"}}
    outside = {name: f"../llama/{file}" for name, file in index["weight_map"].items()}
    errors = []
    for number, (name, content) in enumerate(
        {
            "function": {"config.json": config | {"architectures": ["pipeline"]}},
            "module": {"config.json": config | {"architectures": ["trainer"]}},
            "other class": {"config.json": config | {"architectures": ["AutoTokenizer"]}},
            "dtype": {"config.json": config | {"dtype": "os"}},
            "code": {"config.json": config | auto | {"model_type": "own", "architectures": ["Own"]}},
            "outside": {"model.safetensors.index.json": {"weight_map": outside}},
            "whole path": {
                "model.safetensors.index.json": {"weight_map": dict.fromkeys(outside, str(folder / "llama" / "x"))}
            },
            "deep": {"model.safetensors.index.json": None},
        }.items()
    ):
        path = folder / f"spoiled {number}"
        if world.place.rank == 0:
            shutil.copytree(folder / "llama", path)
            (path / "own.py").write_text(code)
            for file, values in content.items():
                (path / file).write_text("[" * 100_000 if values is None else json.dumps(values))
        dist.barrier()
        with pytest.raises(TrainingError) as raised:
            trainer(nbkit.from_pretrained(path))
        errors.append(f"{name}: {raised.value}")
    return errors


def test_a_foreign_directory_runs_no_code_and_reads_no_other_file(tmp_path: Path) -> None:
    run_ranks(saved, 1, tmp_path, timeout=120)
    one, other = run_ranks(from_elsewhere, 2, tmp_path, timeout=120)

    assert one == other and not (tmp_path / "canary").exists()
    assert all("is not a model" in text for text in one[:3]), one
    assert "trust_remote_code=True" in one[4]
    assert all("names a file outside" in text for text in one[5:7]), one
