"""One pool of eight processes for all tests of this folder; smaller worlds are meshes of some of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for each in pools:
        each.close()


@pytest.fixture
def pool(_pools: list[Pool]) -> Pool:
    """The pool; a new one if a test before left it broken."""
    if not (_pools and _pools[-1].alive):
        _pools.append(Pool(8))
    return _pools[-1]
