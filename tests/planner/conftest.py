"""Makes transformer_weights.py importable here."""

import sys
from pathlib import Path

if (folder := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.insert(0, folder)
