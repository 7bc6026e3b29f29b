"""score_mod, mask_mod and intervals in the kernel of cached calls, under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kvcache.functions import KINDS, LENGTHS, error


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", reversed(KINDS))
@pytest.mark.parametrize("name", LENGTHS)
def test_they_count_from_the_first_query_and_the_first_key(name: str, kind: str) -> None:
    assert error(LENGTHS[name], kind, "portable", packed=name == "window") < 1e-5
