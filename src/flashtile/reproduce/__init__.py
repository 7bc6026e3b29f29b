"""Published figures about exact attention, computed again: theirs, ours, and a verdict.

``published.toml`` holds both, with the check that ours must pass, and the reason where they differ.
"""

from flashtile.reproduce.costs import live
from flashtile.reproduce.report import markdown, reproduce

__all__ = ["live", "markdown", "reproduce"]
