"""Makes models_zoo.py and this folder's cases importable here and in the processes that ranks.py starts."""

import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (here, here.parent) if str(folder) not in sys.path]
