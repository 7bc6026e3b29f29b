"""Published figures about exact attention, computed again: theirs, ours, and a verdict.

``published.toml`` holds both, with the check that ours must pass, and the reason where they differ.
"""

from flashtile_lab.reproduce.costs import live
from flashtile_lab.reproduce.report import markdown, reproduce

__all__ = ["live", "markdown", "reproduce"]
