"""Published figures about exact attention, computed again: theirs, ours, and a verdict.

``published.toml`` holds what was published, the expression that computes ours, the check that it must pass, and the
reason where they differ. Expressions name functions of this package's modules and of ``flashtile.analysis``.
"""

from flashtile.reproduce.costs import live
from flashtile.reproduce.report import markdown, reproduce

__all__ = ["live", "markdown", "reproduce"]
