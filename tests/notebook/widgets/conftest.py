"""Makes tables.py importable for the tests of this folder."""

import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
if str(folder) not in sys.path:
    sys.path.insert(0, str(folder))
