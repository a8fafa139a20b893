"""`python -m nbkit` is the `nbkit` command."""

from __future__ import annotations

import sys

from nbkit.commands import main

if __name__ == "__main__":
    sys.exit(main())
