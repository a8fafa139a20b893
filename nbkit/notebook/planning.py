"""`nbkit.plan`: which strategy to choose for a model, on this machine, a cluster or hardware described in a line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nbkit.errors import UsageError
from nbkit.notebook.call_in_fork import in_a_fork
from nbkit.notebook.progress_line import ProgressLine
from nbkit.planner.choose.hardware import Hardware
from nbkit.planner.choose.load import Subject
from nbkit.planner.choose.ranked_strategies import Plan, Words
from nbkit.planner.choose.search import search
from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.peak.gpt_pieces import GPTPieces
from nbkit.strategy import divisors
from nbkit.unfit_calls import says_what_it_takes

PRECISIONS = {None: 4, "bf16": 2, "fp16": 2}
"""Bytes of what is computed."""
_EXAMPLE = 'nbkit.plan(nbkit.GPTConfig(width=768, layers=12, heads=12), batch=64, on="8 H100")'
_TABLE_SECONDS = 10.0  # for what every strategy would take, which is worked out when somebody asks first
_IN_THE_RANK_WING = "nbkit.rank.train.estimate.model_pieces"

T = TypeVar("T")


@says_what_it_takes(hint=_EXAMPLE)
def plan(
    model: Any,
    *,
    batch: int,
    on: str,
    precision: str | None = "bf16",
    example: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    inputs: Sequence[str] | None = None,
) -> Plan:
    """Every strategy that fits, the best first, with its memory at the peak, its seconds and what it sends.

    model: a GPTConfig, of which nothing is built and for which torch is not needed; or a module, or a callable that
    builds one. Of those, two rows of example= are run on the CPU: a batch of any number of rows, or a callable that
    makes one; loss=, optimizer= (default: AdamW) and inputs= are as of the Trainer. Callables run in a process of their
    own, unless torch has been imported in this one. batch: rows of a global batch. on: hardware in a line,
    "128 x 8 H100". precision: as a Trainer has it. `.rows[0]` is the recommendation, `.refused` what does not fit, with
    the arithmetic. Raises UsageError for what cannot be planned, and what the model raises.
    """
    asked = _Asked(model, batch, Hardware.parse(on), precision, example, loss, optimizer, inputs)
    return asked.answered(lambda subject: search(subject, batch, asked.on))


def explain(model: Any, first: str, second: str, *, batch: int, on: str, **settings: Any) -> Words:
    """What two rows of a plan differ in, and what would be chosen with more devices, a faster network, more rows.

    settings: the others of `plan`.
    """
    asked = _Asked(model, batch, Hardware.parse(on), **settings)
    return asked.answered(lambda subject: _explained(subject, first, second, batch, asked.on))


def planned(
    variables: Mapping[str, Any],
    *,
    model: str | None,
    batch: int | None,
    on: str | None,
    precision: str,
    why: list[str] | None,
    **others: str | None,
) -> Plan | Words:
    """What `%nbkit plan` shows. variables: of the notebook; model and others (example, loss, optimizer) name some.

    Without a model: the training that runs, see `training_plan`.
    """
    given_too = {"--batch": batch, "--on": on, "--why": why, **{f"--{name}": value for name, value in others.items()}}
    if model is None and not any(value is not None for value in given_too.values()):
        return training_plan()
    if model is None or batch is None or on is None:
        missing = [name for name, value in {"NAME": model, "--batch": batch, "--on": on}.items() if value is None]
        raise UsageError(
            "%nbkit plan takes a model, its batch and the hardware, or nothing, for the training that runs.",
            numbers=f"missing: {', '.join(missing)}",
            hint="%nbkit plan config --batch 512 --on '8 H100'   or   %nbkit plan",
        )
    named = {"model": model, **{setting: name for setting, name in others.items() if name is not None}}
    for setting, name in named.items():
        if name not in variables:
            raise UsageError(
                f"The notebook has no variable {name!r}.",
                numbers="%nbkit plan takes the names of a GPTConfig, a module or a callable that builds one, and of "
                "what it is run on and trained with",
                hint=f"{name} = nbkit.GPTConfig(width=768, layers=12, heads=12)"
                if setting == "model"
                else f"{name} = ...   (as {setting}= of nbkit.plan)",
            )
    given = {setting: variables[name] for setting, name in named.items()}
    settings = {**given, "batch": batch, "on": on, "precision": None if precision == "fp32" else precision}
    if why is not None:
        return explain(settings.pop("model"), *why, **settings)
    return plan(**settings)


def training_plan() -> Words:
    """Return what every strategy would take of the training on this notebook's cluster, as the strategy panel has it.

    Raises UsageError where nothing trains there, ClusterError without a cluster.
    """
    from nbkit.notebook.cluster.cluster import current
    from nbkit.notebook.widgets.panel.state import Looked, State, reduce
    from nbkit.notebook.widgets.panel.view import text_of

    cluster = current()
    cluster.training.look_well(_TABLE_SECONDS)
    state = reduce(State(cluster.entry.name, cluster.entry.n), Looked(cluster.training.look()))
    if state.phase == "none":
        raise UsageError(
            "There is no training to plan on the ranks yet.",
            numbers=f"cluster {cluster.entry.name}, {cluster.entry.n} ranks",
            hint="%nbkit plan config --batch 512 --on '8 H100'   or   trainer = nbkit.Trainer(...)",
        )
    return Words(text_of(state))


@dataclass(frozen=True)
class _Asked:
    """Checked when it is made."""

    model: Any
    batch: int
    on: Hardware
    precision: str | None = "bf16"
    example: Any = None
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    inputs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"There is no precision {self.precision!r}.", numbers="None, 'bf16', 'fp16'", hint="precision='bf16'"
            )
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise UsageError("A batch has at least one row.", numbers=f"batch={self.batch!r}", hint="batch=64")
        if isinstance(self.model, GPTConfig):
            return
        if not callable(self.model):  # a module is
            raise UsageError(
                "A plan is made of a GPTConfig, a module, or a callable that builds one.",
                numbers=f"this is a {type(self.model).__name__}",
                hint=_EXAMPLE,
            )
        if lacks := [name for name in ("example", "loss") if getattr(self, name) is None]:
            raise UsageError(
                "A model that is no GPTConfig is run, to be looked at.",
                numbers=f"without {' and '.join(f'{name}=' for name in lacks)}",
                hint="nbkit.plan(model, example=batch, loss=loss_fn, batch=64, on='8 H100')",
            )

    def answered(self, make: Callable[[Subject], T]) -> T:
        """What `make` makes of the model; in a fork where torch would be imported for it alone."""
        if isinstance(self.model, GPTConfig):
            return make(GPTPieces(self.model, element=PRECISIONS[self.precision]))
        with ProgressLine("nbkit.plan", "imports torch") as line:
            if "torch" in sys.modules:
                return make(self._measured(line.say))
            return in_a_fork(lambda say: make(self._measured(say)), heard=line.say)

    def _measured(self, say: Callable[[str], None]) -> Subject:
        # By name: this wing imports neither torch nor what does, except for a user who has a model.
        found: Subject = importlib.import_module(_IN_THE_RANK_WING).describe(
            self.model,
            self.example() if callable(self.example) else self.example,
            loss=self.loss,
            optimizer=self.optimizer,
            inputs=self.inputs,
            precision=self.precision,
            degrees=divisors(self.on.node)[1:],
            say=say,
        )
        return found


def _explained(subject: Subject, first: str, second: str, batch: int, on: Hardware) -> Words:
    made = search(subject, batch, on)
    others = {
        "twice the devices": (batch, replace(on, nodes=2 * on.nodes)),
        "a network twice as fast": (batch, replace(on, device=replace(on.device, far=2 * on.device.far))),
        "a batch twice as large": (2 * batch, on),
    }
    lines = [made.why(first, second).text, f"The first row is {made.rows[0].settings}. It would be"]
    for what, (rows, other) in others.items():
        found = search(subject, rows, other)
        lines.append(f"  with {what}: {found.rows[0].settings if found.rows else 'nothing that fits'}")
    return Words("\n".join(lines))
