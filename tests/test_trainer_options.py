"""Test the Trainer's option values: what they refuse, how they print, and which old keywords they replace."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

import nbkit
from nbkit.errors import NbkitError, TrainingError, UsageError
from nbkit.old_keywords import OLD_KEYWORDS, regrouped
from nbkit.trainer_options import OPTIONS, check_options

ROOT = Path(__file__).resolve().parents[1]
WRONG: dict[str, tuple[Callable[[], object], str, str, str]] = {
    "no number of steps": (lambda: nbkit.Checkpoints(every=0), "a whole number", "every=0", "Checkpoints(every="),
    "no time": (lambda: nbkit.Checkpoints(every="soon"), "'soon' is no length of time", "seconds", "10min"),
    "none stays": (lambda: nbkit.Checkpoints(keep=0), "a whole number", "keep=0", "Checkpoints(keep=3)"),
    "one of both": (lambda: nbkit.Checkpoints(keep=(3,)), "or both", "keep=(3,)", "Checkpoints(keep=3)"),  # type: ignore[arg-type]
    "no age": (lambda: nbkit.Checkpoints(keep=(3, "x")), "'x' is no length of time", "seconds", "2h"),
    "no snapshots": (lambda: nbkit.Checkpoints(snapshot_every=0), "whole", "snapshot_every=0", "snapshot_every=50)"),
    "no rows": (lambda: nbkit.Compute(microbatch_size=-1), "whole number", "microbatch_size=-1", "microbatch_size=8)"),
    "no part": (lambda: nbkit.Compute(recompute="all"), "no recompute 'all'", "'selective', True", "='selective'"),
    "no bool": (lambda: nbkit.Compute(recompute=1), "no recompute 1", "'selective', True", "='selective'"),
    "no format": (lambda: nbkit.Compute(fp8="e4m3"), "no fp8 'e4m3'", "False, True", "Compute(fp8=True)"),  # type: ignore[arg-type]
    "no norms": (lambda: nbkit.Compute(grad_norm_every=0), "whole number", "grad_norm_every=0", "grad_norm_every="),
    "no place": (lambda: nbkit.Compute(offload="disk"), "no place 'disk'", "None, 'cpu'", "Compute(offload='cpu')"),
    "no dropout": (lambda: nbkit.Compute(dropout="x"), "no dropout 'x'", "'keyed', 'fused'", "dropout='keyed'"),
    "no policy": (lambda: nbkit.Recovery(on_failure="grow"), "no on_failure 'grow'", "'shrink'", "='replace'"),
    "no seconds": (lambda: nbkit.Recovery(hang_timeout=0), "more than 0", "hang_timeout=0", "hang_timeout=60)"),
    "yes": (lambda: nbkit.Recovery(hang_timeout=True), "more than 0", "hang_timeout=True", "hang_timeout=60)"),
    "no answer": (lambda: nbkit.Recovery(on_oom="x"), "no on_oom 'x'", "'ask', 'fit', 'raise'", "on_oom='fit'"),
    "no backups": (lambda: nbkit.Recovery(backup_every=-1), "whole number", "backup_every=-1", "backup_every=10)"),
    "no processes": (lambda: nbkit.Loading(workers=-1), "at least 0", "workers=-1", "Loading(workers=2)"),
    "no field": (lambda: nbkit.Loading(worker=2), "unexpected keyword", "it takes shuffle=", "workers=..."),  # type: ignore[call-arg]
    "no group": (lambda: check_options(recovery="stop"), "takes nbkit.Recovery", "'stop'", "Recovery(on_failure="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_value_is_refused_at_creation_with_a_hint(name: str) -> None:
    make, what, numbers, hint = WRONG[name]

    with pytest.raises((TrainingError, UsageError)) as refused:
        make()

    assert what in refused.value.what and numbers in refused.value.numbers and hint in refused.value.hint


def test_valid_option_values_are_accepted() -> None:
    assert nbkit.Checkpoints(every=False).steps is None and nbkit.Checkpoints(every=500).steps == 500
    assert nbkit.Checkpoints(every="10min").seconds == 600 and nbkit.Checkpoints(every="10min").steps is None
    assert nbkit.Checkpoints(keep=3).limits == (3, None) and nbkit.Checkpoints(keep=(3, "2h")).limits == (3, 7200)
    assert nbkit.Checkpoints(keep="2h").limits == (None, 7200) and nbkit.Checkpoints().limits is None
    assert nbkit.Recovery(backup_every=0).backup_every == 0
    with pytest.raises(FrozenInstanceError):
        nbkit.Recovery().on_oom = "fit"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"recovery": nbkit.Recovery(on_oom="fit", backup_every=2)}, "recovery=nbkit.Recovery(backup_every=2)"),
        ({"recovery": nbkit.Recovery(on_failure="shrink")}, "recovery=nbkit.Recovery(on_failure='replace')"),
        ({"compute": nbkit.Compute(grad_norm_every=5)}, "job.grad_norm()"),
    ],
)
def test_prepare_refuses_options_that_only_a_trainer_supports(given: dict[str, Any], hint: str) -> None:
    with pytest.raises(TrainingError) as refused:
        nbkit.prepare(nn.Linear(2, 2), lambda model: SGD(model.parameters(), lr=0.1), loss=mse_loss, **given)

    assert hint in refused.value.hint


def test_the_repr_of_an_option_recreates_it() -> None:
    made = nbkit.Checkpoints(every="10min", keep=(3, "2h"))

    assert repr(made) == "nbkit.Checkpoints(every='10min', keep=(3, '2h'))"
    assert eval(repr(made)) == made and repr(nbkit.Loading()) == "nbkit.Loading()"
    assert repr(nbkit.Loading(collate=len, workers=2)) == "nbkit.Loading(collate=len, workers=2)"
    assert repr(nbkit.ModelHints(example=[0] * 100)) == "nbkit.ModelHints(example=...)"


def test_the_trainer_signature_is_short_and_its_docstring_has_every_option() -> None:
    parameters = inspect.signature(nbkit.Trainer).parameters

    assert list(parameters)[:6] == ["model", "loss", "optimizer", "data", "batch_size", "strategy"]
    assert len(parameters) <= 24
    assert {name for name, kind in OPTIONS.items() if parameters[name].default == kind()} == set(OPTIONS)
    described = nbkit.Trainer.__doc__ or ""
    assert [
        field.name for kind in OPTIONS.values() for field in fields(kind) if f"{field.name}=" not in described
    ] == []


def called(**given: Any) -> tuple[dict[str, Any], list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return regrouped(given, inspect.signature(nbkit.Trainer).parameters), told


@pytest.mark.parametrize("old", OLD_KEYWORDS)
def test_each_old_keyword_maps_to_an_option_field(old: str) -> None:
    argument, field = OLD_KEYWORDS[old]
    value = getattr(OPTIONS[argument](), field)

    given, told = called(**{old: value})

    assert given == {argument: OPTIONS[argument]()}
    assert [each.category for each in told] == [DeprecationWarning]


def test_one_warning_names_all_old_keywords_and_what_to_type() -> None:
    given, told = called(batch_size=8, save_every=5, keep="2h", on_oom="fit", log_every=3)

    checkpoints, recovery = nbkit.Checkpoints(every=5, keep="2h"), nbkit.Recovery(on_oom="fit")
    compute = nbkit.Compute(grad_norm_every=3)
    assert given == {"batch_size": 8, "checkpoints": checkpoints, "recovery": recovery, "compute": compute}
    assert [str(each.message) for each in told] == [
        "save_every=, keep=, on_oom=, log_every= are deprecated: "
        "type checkpoints=nbkit.Checkpoints(every=5, keep='2h'), recovery=nbkit.Recovery(on_oom='fit'), "
        "compute=nbkit.Compute(grad_norm_every=3)"
    ]


def test_a_call_without_old_keywords_is_unchanged() -> None:
    given, told = called(batch_size=8, checkpoints=nbkit.Checkpoints())

    assert given == {"batch_size": 8, "checkpoints": nbkit.Checkpoints()} and told == []


def test_an_old_keyword_together_with_its_option_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        called(save_every=5, checkpoints=nbkit.Checkpoints(keep=2))

    assert refused.value.what == "save_every= and checkpoints= are given together."
    assert refused.value.hint == "checkpoints=nbkit.Checkpoints(every=5, keep=2)"
    with pytest.raises(TrainingError, match=r"takes nbkit\.Recovery"):
        called(on_oom="fit", recovery="stop")


def test_an_old_value_is_checked_like_a_new_one() -> None:
    with pytest.raises(TrainingError, match="a whole number"):
        called(save_every=0)


@pytest.mark.parametrize("call", [nbkit.Trainer, nbkit.prepare, nbkit.check])
def test_deprecation_warnings_point_at_the_callers_file(call: Callable[..., Any]) -> None:
    with warnings.catch_warnings(record=True) as told, pytest.raises((NbkitError, TypeError)):
        warnings.simplefilter("always")
        call(stages=["1"], no_such_argument=1)

    assert [(each.category, each.filename) for each in told] == [(DeprecationWarning, __file__)]


def sources() -> Iterator[tuple[Path, str]]:
    """Yield the code of this tree, of its notebooks' code cells, and of the pages' blocks."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in map(ROOT.joinpath, tracked.splitlines()):
        if path.suffix == ".py" and path != Path(__file__):
            yield path, path.read_text()
        elif path.suffix == ".ipynb":
            cells = (cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code")
            yield from ((path, re.sub(r"(?m)^[%!].*$", "", "".join(cell["source"]))) for cell in cells)
        elif path.suffix == ".md" and path.name != "CHANGELOG.md":
            blocks = re.findall(r"```\w+\n(.*?)```", path.read_text(), re.DOTALL)
            yield from ((path, line) for block in blocks for line in (block, *block.splitlines()))


def test_no_code_of_nbkit_uses_an_old_keyword() -> None:
    found = []
    for path, source in sources():
        if re.search(r"\b(Trainer|prepare)\(", source):
            with contextlib.suppress(SyntaxError):  # a block that is not Python
                calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
                made = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("Trainer", "prepare")]
                found += [(path, word.arg) for call in made for word in call.keywords if word.arg in OLD_KEYWORDS]

    assert found == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("num_workers", "loading=nbkit.Loading(workers=...)"),
        ("collate_fn", "loading=nbkit.Loading(collate=...)"),
        ("path", "checkpoints=nbkit.Checkpoints(path=...)"),
        ("checkpoint", "checkpoints=..."),
        ("hang_timeouts", "recovery=nbkit.Recovery(hang_timeout=...)"),
    ],
)
def test_a_wrong_keyword_gets_a_hint_with_the_right_option(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        nbkit.Trainer(**{typed: 1})

    assert refused.value.hint == meant
