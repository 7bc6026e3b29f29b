"""Says where ``flashtile.analysis`` is now."""

raise ModuleNotFoundError(
    "flashtile.analysis is flashtile_lab.analysis now: pip install ./extras in flashtile's repository", name=__name__
)
