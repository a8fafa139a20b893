"""Makes the package `parity` of the repository's root importable here and in the processes of its ranks."""

import sys
from pathlib import Path

for folder in (Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[1] / "rank"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
