"""Makes models_zoo.py importable here and in the processes that ranks.py starts; small models run on one thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if (folder := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.insert(0, folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
