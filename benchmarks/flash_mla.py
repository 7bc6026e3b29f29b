"""FlashMLA's dense decode: an extension module, built from its sources."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    """The module's function; it has the file's name."""
    spec = importlib.util.spec_from_file_location(Path(path).name.split(".")[0], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dense_decode_fwd
