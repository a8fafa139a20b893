"""Makes ranks.py importable here, and this folder's test modules importable in the processes that ranks.py starts."""

import sys
from pathlib import Path

for folder in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
