"""The proof that a strategy trains as one process does: models, and one machine that trains each beside plain torch.

`python -m verify parity` asks how far apart the figures are, on models that fit every strategy. `python -m verify zoo`
asks what becomes of any model: it trains as one process does, or it is refused before its first step, and `nbkit.check`
has said so. `planted` puts known bugs into the ranks, and `fuzz` splits models that are drawn at random.

cases.py lists what is trained, training.py trains it in ranks and in one process, compare.py judges the difference, and
rank_sets.py runs many cases in few sets of processes.
"""

import sys
from pathlib import Path

# Ranks are started by the code of the tests.
if (_support := str(Path(__file__).resolve().parents[1] / "tests/support")) not in sys.path:
    sys.path.insert(0, _support)
