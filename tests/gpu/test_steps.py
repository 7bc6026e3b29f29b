"""On a GPU: calls in steps at real sizes, forward and gradients, against float64."""

from __future__ import annotations

import pytest
import torch

from flashtile.call.backend import Backend
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from tests.cases import Case, build
from tests.gpu.test_gpu import BACKENDS, SHORT
from tests.origins import judge_parts
from tests.partials import BANDS, judge_chain, judge_rows_without_keys
from tests.poison import poisoned_memory
from tests.sums import judge_gaps, judge_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Keys counted from each sequence's end at which it is cut, into two to four pieces.
CHAINS: tuple[tuple[Case, tuple[int, ...]], ...] = (
    (Case("causal_128", batch=1, seqlen_q=2048, seqlen_k=2048, heads=4, kv_heads=2, head_dim=128, causal=True),
     (1024,)),
    (Case("full_128", batch=2, seqlen_q=1500, seqlen_k=2100, heads=2, head_dim=128, lse_grad=True), (1600, 1100, 77)),
    (Case("causal_64", batch=1, seqlen_q=2048, seqlen_k=2048, heads=4, kv_heads=1, head_dim=64, causal=True),
     (1300, 64)),
    (Case("causal_256", batch=1, seqlen_q=1000, seqlen_k=1200, heads=2, kv_heads=1, head_dim=256, causal=True), (700,)),
    (Case("window_96", batch=1, seqlen_q=1600, seqlen_k=1600, heads=2, head_dim=96, window=(500, 0), softcap=9.0),
     (800,)),
    (Case("varlen_128", batch=4, lengths=((1000, 1000), (300, 700), (0, 64), (640, 640)), heads=4, kv_heads=2,
          head_dim=128, causal=True, sinks=True, spare=33), (500, 64)),
    (Case("varlen_64", batch=3, lengths=((700, 900), (1, 300), (513, 513)), head_dim=64, causal=True, lse_grad=True),
     (300, 290, 33)),
)  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """A backend that runs a backward on this device."""
    problem = build(CHAINS[0][0], torch.bfloat16, "cuda").problem
    if dispatch.reasons(request.param, problem, "backward"):
        pytest.skip(f"{request.param} does not run on this device")
    return dispatch.backend(request.param)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(
    backend: Backend, case: Case, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    with poisoned_memory(), torch.no_grad():
        judge_chain(backend, case, cuts, dtype, exact=False, device="cuda")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_gradients_of_pieces_add_up_in_float32(
    backend: Backend, case: Case, cuts: tuple[int, ...], dtype: torch.dtype, deterministic: bool
) -> None:
    # Hopper's last kernel may scale and add in one rounding.
    exact = backend.name == "portable"
    with poisoned_memory():
        judge_sums(backend, case, cuts, dtype, exact=exact, deterministic=deterministic, device="cuda")


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_rows_without_keys_keep_what_they_start_from(backend: Backend, band: Band) -> None:
    with poisoned_memory():
        judge_rows_without_keys(backend, torch.bfloat16, band, "cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_gaps_keep_their_sums(backend: Backend, band: Band, head_dim: int) -> None:
    with poisoned_memory():
        judge_gaps(backend, torch.bfloat16, band, head_dim=head_dim, device="cuda")


@pytest.mark.parametrize(("dropout", "alibi"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [*SHORT, torch.float32], ids=str)
def test_parts_are_drawn_and_sloped_as_in_the_whole(dtype: torch.dtype, dropout: bool, alibi: bool) -> None:
    with poisoned_memory():
        judge_parts(dispatch.backend("portable"), dtype, dropout=dropout, alibi=alibi, head_dim=64, device="cuda")
