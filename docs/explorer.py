"""A hook of mkdocs: the explorer's page, as ``flashtile-lab explore`` writes it, becomes a file of the site."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from flashtile_lab.explore import page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the files of the site; adds ``explore.html``, made from the sources as they are."""
    files.append(File.generated(config, "explore.html", content=page()))
    return files
