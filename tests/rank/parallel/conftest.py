"""Makes models_zoo.py importable here and in the processes that ranks.py starts."""

import sys
from pathlib import Path

if (folder := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.insert(0, folder)
