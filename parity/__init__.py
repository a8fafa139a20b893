"""The proof that a strategy trains as one process does: the whole product path beside a loop in plain torch.

Stands on the models and the rank processes that the tests have.
"""

import sys
from pathlib import Path

for folder in ("tests/support", "tests/models"):
    if (path := str(Path(__file__).resolve().parents[1] / folder)) not in sys.path:
        sys.path.insert(0, path)
