"""Provide a kernel with a cluster of two ranks, for tests whose cells do not disturb each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_client import Kernel


@pytest.fixture(scope="package")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("home")) as kernel:
        kernel.run("%load_ext nbkit")
        cell = kernel.run("%cluster start -n 2 --cpu --name shown")
        assert cell.status == "ok", cell.text
        yield kernel
        kernel.run("%cluster stop")
