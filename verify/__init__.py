"""Check that a strategy trains as one process does: train models on ranks and in plain torch, and compare them.

`python -m verify parity` measures the differences, on models that fit every strategy. `python -m verify zoo` takes any
model. It must train as one process does, or be refused before its first step, as `nbkit.check` predicted. `planted`
puts known bugs into the ranks, and the comparison must detect each. `fuzz` splits random models.

cases.py lists the cases. training.py trains a case, on ranks and in one process. compare.py judges the difference.
rank_sets.py runs many cases in few sets of processes. models/ has the models.
"""

import sys
from pathlib import Path

# The code of the tests starts the ranks.
if (_support := str(Path(__file__).resolve().parents[1] / "tests/support")) not in sys.path:
    sys.path.insert(0, _support)
