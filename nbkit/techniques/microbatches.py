"""microbatches=8: the number of parts of a rank's rows that pass through a pipeline, one after the other."""

from __future__ import annotations

from nbkit.errors import StrategyError
from nbkit.schedules import checked_sizes, type_of
from nbkit.techniques.key import AnyStrategy, Key, whole_number


class MicrobatchesKey(Key):
    """A whole number. The default is twice the ranks of the pipeline. The key needs pp."""

    name = "microbatches"
    is_field = True

    def parse(self, text: str) -> int:
        return whole_number(self.name, text)

    def refuse(self, value: int, strategy: AnyStrategy) -> None:
        if value < 1:
            twice = 2 * strategy.degree("pp")
            raise StrategyError(
                "A step needs at least one micro-batch.",
                numbers=f"microbatches={value}",
                hint=f"microbatches={twice}, twice the pipeline's ranks",
            )

    def no_effect(self, value: int, strategy: AnyStrategy) -> str:
        return "with pp=1: there is no pipeline" if strategy.degree("pp") == 1 and value != 1 else ""

    def settle(self, value: int | None, strategy: AnyStrategy) -> int | None:
        pp, schedule = strategy.degree("pp"), strategy.schedule
        if pp == 1 or schedule is None:
            return None
        found, least = 2 * pp if value is None else value, type_of(schedule).microbatches_per_rank * pp
        if found < least:
            raise StrategyError(
                f"{schedule} needs more micro-batches.",
                numbers=f"at least {least // pp} x pp {pp} = {least}, {found} given",
                hint=f"microbatches={least}, or schedule=1f1b",
            )
        checked_sizes(schedule, pp, found)
        return found
