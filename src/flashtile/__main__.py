"""``python -m flashtile`` is the ``flashtile`` command."""

from __future__ import annotations

import sys

from flashtile.cli import main

if __name__ == "__main__":
    sys.exit(main())
