"""``pytest -p tests.ptx.plugin``: tests that run the Hopper kernels' source run what the compiler makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.backends.hopper import emulated
from tests.ptx import hopper
from tests.ptx.machine import Options


@contextmanager
def on_cpu(
    seed: int = 0, num_sms: int = 3, forward: Any = None, backward: Any = None, ordered_sums: bool = False
) -> Iterator[None]:
    """As the emulator's."""
    at_wait = {"wait": True, "issue": False}.get(os.environ.get("PTX_PRODUCTS", ""), seed % 2 == 0)
    watch = os.environ.get("PTX_WATCH", "1") == "1"
    options = Options(seed=seed, product_at_wait=at_wait, watch=watch, ordered_sums=ordered_sums)
    with hopper.on_cpu(options, num_sms, forward, backward):
        yield


emulated.on_cpu = on_cpu
