"""Makes tests/support and tests/models importable, here and in the processes that the tests start."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
for folder in (_TESTS / "models", _TESTS / "support", _TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
