"""``python -m flashtile_lab``."""

from __future__ import annotations

import sys

from flashtile_lab.commands import main

if __name__ == "__main__":
    sys.exit(main())
