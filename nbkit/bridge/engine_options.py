"""What nbkit sets of ipyparallel's engine, for ranks and for engines that stand in for them."""

from __future__ import annotations

from nbkit.wire.cells import SIGNATURES_KEPT

OPTIONS = (
    "--IPEngine.enable_nanny=False",  # the parent that forked the ranks is their nanny
    "--IPEngine.timeout=60",
    "--IPEngine.max_heartbeat_misses=0",  # the parent watches the controller; a busy rank never leaves
    f"--Session.digest_history_size={SIGNATURES_KEPT}",
)
