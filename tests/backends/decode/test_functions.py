"""score_mod, mask_mod and intervals in the kernel of cached calls, under Triton's interpreter."""

from __future__ import annotations

import pytest

from flashtile.backends.gpu.decode.config import Config, Splitting
from flashtile.backends.gpu.trial import trial
from tests.kvcache.functions import HUGE, KINDS, LENGTHS, error, huge_error


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", reversed(KINDS))
@pytest.mark.parametrize("name", LENGTHS)
def test_they_count_from_the_first_query_and_the_first_key(name: str, kind: str) -> None:
    assert error(LENGTHS[name], kind, "portable", packed=name == "window") < 1e-5


@pytest.mark.parametrize(("value", "sinks"), zip(HUGE, (True, False) * 2, strict=True))
def test_scores_as_huge_as_float32_has_them(value: float, sinks: bool) -> None:
    """In splits that go through memory, with and without pages and bounds."""
    assert huge_error(value, "portable", page_size=16 * sinks, packed=value == -1e9, sinks=sinks) < 1e-5


@pytest.mark.parametrize("programs", [1, 7])
def test_such_scores_in_tiles_of_many_rows(programs: int) -> None:
    """Where the scale is applied before the mask; one program folds states in registers."""
    splitting = Splitting(programs=8, fewest_keys=16, most_keys=32, most_splits=8, run=2)
    with trial(decode=Config(64, 16, 4, 1, programs, splitting)):
        assert huge_error(HUGE[2], "portable", page_size=8) < 1e-5
