"""Test that wrong calls of a Trainer get an error with the length of an epoch, or the line of the cell."""

import warnings
from collections.abc import Callable
from typing import Any

from jobs import SEED, mean_loss, net, points, quiet
from ranks import run_ranks
from torch import optim

import nbkit
from nbkit.errors import UsageError
from nbkit.rank.train.trainer import Trainer


def refusal(call: Callable[..., Any], **named: Any) -> UsageError:
    try:
        call(**named)
    except UsageError as error:
        return error
    raise AssertionError(f"{call} took {named}")


def answers(world: Any) -> dict[str, Any]:
    """Return the errors of wrong calls, and the file that a warning names."""
    settings: dict[str, Any] = {"optimizer": lambda model: optim.SGD(model.parameters(), lr=0.1), "progress": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = Trainer(
            model=net, loss=mean_loss, data=points(23), batch_size=4, seed=SEED, log_dir=None, eval_every=2, **settings
        )
    dropping = quiet(data=points(23), batch_size=4, loading=nbkit.Loading(drop_last=True))
    found = {
        "warned of": [each.filename for each in told if "eval_every" in str(each.message)],
        "epochs": refusal(trainer.fit, epochs=2),
        "epochs without the last": refusal(dropping.fit, epochs=2),
        "nearly steps": refusal(trainer.fit, max_steps=2),
        "batches": refusal(trainer.job.batches),
        "trainer": refusal(Trainer, model=net, dataset=points()),
        "made": len(trainer.fit(12)),
    }
    return found | {"epochs passed": trainer._stream.epoch, "left": trainer._stream.offset}


def test_unknown_arguments_of_fit_get_a_hint_with_the_length_of_an_epoch() -> None:
    [found] = run_ranks(answers, 1)

    assert found["epochs"].what == "Trainer.fit() got an unexpected keyword argument 'epochs'."
    assert found["epochs"].numbers == "it takes steps=, until=, resume="
    assert found["epochs"].hint == "trainer.fit(12)   is two epochs of these data, of 6 steps each"
    assert (found["made"], found["epochs passed"], found["left"]) == (12, 1, 23)
    assert found["epochs without the last"].hint.startswith("trainer.fit(10)   is two epochs")
    assert found["nearly steps"].hint == "steps=..."
    assert found["batches"].hint == "for batch in job.batches(loader):"
    assert found["trainer"].what == "Trainer() got an unexpected keyword argument 'dataset'."
    assert found["trainer"].hint == "data=..."
    assert found["warned of"] == [__file__]
