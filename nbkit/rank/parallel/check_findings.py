"""Findings about a strategy on a model before anything moves: the planner's arithmetic on the module tree."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn

from nbkit.errors import StrategyError
from nbkit.planner.job_facts import Facts
from nbkit.planner.validate import Finding, refuse, validate
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.module.compile import not_compiled
from nbkit.rank.parallel.options import Options, parts_rows
from nbkit.rank.parallel.pipeline.layer_chain import Chain
from nbkit.rank.parallel.tensor.plan.plan import folded
from nbkit.rank.torch_private import DropoutNd
from nbkit.strategy import Strategy


def facts_of(
    model: nn.Module, strategy: Strategy, options: Options, *, batch: int | None = None, world: int | None = None
) -> Facts:
    """Heads and vocabulary as the tensor plan sees them; blocks of the chain, or by structure where there is none."""
    heads = kv_heads = vocab = None
    if strategy.tp > 1:
        plan = options.plan(model, 1)
        counted = [pair.heads for pair in plan.pairs if pair.heads is not None]
        # Of several attentions, one that does not divide.
        counted.sort(key=lambda each: not (each.heads % strategy.tp or each.kv_heads % strategy.tp))
        if counted:
            heads = counted[0].heads
            kv_heads = None if counted[0].kv_heads == heads else counted[0].kv_heads
        tables = [model.get_submodule(path) for path, role in plan.singles.items() if role == "vocab"]
        vocab = min((part.num_embeddings for part in tables if isinstance(part, nn.Embedding)), default=None)
    chain: Chain | None = options.chain
    blocks = len(chain) if chain is not None else len(structural_blocks(model)) or None
    return Facts(heads=heads, kv_heads=kv_heads, vocab=vocab, blocks=blocks, batch=batch, world=world)


def findings(
    model: nn.Module, strategy: Strategy, options: Options, *, batch: int | None = None, world: int | None = None
) -> list[Finding]:
    """All that is to be said, errors first; also where the model cannot be split at all."""
    try:
        found = validate(strategy, facts_of(model, strategy, options, batch=batch, world=world))
        return [*found, *_unproven(model, strategy, options)]
    except StrategyError as error:
        return [Finding(True, error.what, error.numbers or "", error.hint or "")]


def _unproven(model: nn.Module, strategy: Strategy, options: Options) -> Iterator[Finding]:
    """What stays whole although it looks as if a tensor axis could split it; alike modules of a list once."""
    if strategy.tp == 1:
        return
    said: dict[str, list[str]] = {}
    for path, why in options.plan(model, 1).unproven.items():
        said.setdefault(why, []).append(folded(path) or type(model).__name__)
    for why, paths in said.items():
        names = list(dict.fromkeys(paths))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if options.proof.of(1) is None:
            hint = "example=batch, for prepare() and the Trainer; nbkit.check(model, strategy, batch)"
        else:
            hint = f"to split its weights all the same: tp_plan={{'{names[0]}.*': 'colwise_gather'}}"
        yield Finding(False, f"{shown}: whole on every rank of the tensor axis.", why, hint)


def warn_of(model: nn.Module, strategy: Strategy, options: Options) -> None:
    """Warn of what runs and is good to know. Raises StrategyError, with the arithmetic, for what cannot run."""
    found = [*refuse(strategy, facts_of(model, strategy, options)), *_unproven(model, strategy, options)]
    if strategy.microbatches is not None and options.cut:
        numbers = f"microbatch_size= has no effect under {strategy}: a pipeline cuts into as many as microbatches= says"
        found.append(Finding(False, "A setting has no effect.", numbers))
    found += [*warn_of_coupled(options, strategy), *warn_of_draws(options, strategy)]
    dropping = any(isinstance(part, DropoutNd) and part.p > 0 for part in model.modules())
    why = "with dropout, which is keyed by sample" if dropping else not_compiled(options, strategy)
    if options.compile and why:
        numbers = f"compile= has no effect {why}: the blocks run as they are"
        found.append(Finding(False, "A setting has no effect.", numbers))
    for finding in found:
        warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=2)


def warn_of_draws(options: Options, strategy: Strategy) -> list[Finding]:
    """What is to be said of random numbers that each rank and each forward draws by itself."""
    unkeyed = options.draws.unkeyed if options.draws is not None else ()
    if not unkeyed or (strategy.mesh.size == 1 and not options.cut):
        return []
    what = "The model draws random numbers that are not keyed by row: ranks and micro-batches draw their own."
    shown = ", ".join(unkeyed[:4]) + (f" and {len(unkeyed) - 4} more" if len(unkeyed) > 4 else "")
    return [Finding(False, what, shown, "torch.rand, randn, randint, bernoulli and their kin, without generator=")]


def warn_of_coupled(options: Options, strategy: Strategy) -> list[Finding]:
    """What is to be said of an auxiliary term of which `strategy` computes parts."""
    found = options.coupled
    if found is None or not found.trains or not parts_rows(options, strategy):
        return []
    what = f"{found.what}: under {strategy} it is the mean of what each forward gives for its rows."
    return [Finding(False, what, found.numbers)]
