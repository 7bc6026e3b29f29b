"""The tile table: legal, complete, blind to the batch; and the builds that are watched."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from flashtile.backends.gpu import trial as trials
from flashtile.backends.gpu.launch import leaf_names
from flashtile.backends.gpu.trial import on_trial, trial
from flashtile.backends.portable import BACKEND, tuned
from flashtile.backends.portable import config as tiles
from flashtile.backends.portable.backward import config as backward
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.forward import config as forward
from flashtile.backends.portable.quantized import config as quantized
from flashtile.call.arguments import FLOAT8
from flashtile.call.problem import Problem
from flashtile.core.masks import Band
from flashtile_lab.kernels import report
from flashtile_lab.kernels.portable import builds
from tests.cases import Case, build
from tests.mods.calls import with_functions

ARCHS = [*tiles.SHARED_BYTES]


def _choose(problem: Problem, kernel: str, arch: str | None = None) -> PortableTiles:
    return forward.choose(problem, arch) if kernel == "forward" else backward.choose(problem, kernel, arch)


def _problem(head_dim: int, **changes: object):
    return build(Case("x", head_dim=head_dim), torch.float16).problem.but(**changes)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "changes", [{}, {"band": Band(None, 0)}, {"varlen": True}, {"mask": True}, {"dtype": torch.float32}], ids=str
)
def test_every_head_dim_has_tiles_that_fit(arch: str, changes: dict[str, object]) -> None:
    for head_dim in (1, 16, 24, 64, 80, 128, 192, 256, 320, 512):
        problem = _problem(head_dim, **changes)
        for kernel in ("forward", *backward.key_kernels(problem, arch), "dq", "dbias"):
            config = _choose(problem, kernel, arch)
            fixed, moving = config.block_m, config.block_n
            if kernel in ("dkdv", "dk", "dv"):
                fixed, moving = moving, fixed
            # Two moving operands in num_stages tiles, and at least one fixed operand that matrix units read.
            rows = moving + fixed if kernel == "dbias" else 2 * moving * config.num_stages + fixed
            if arch == "gfx942" and problem.dtype == torch.float32 and head_dim > 256:
                continue  # by compiler reports 32 KB: operands of float32 pass through one buffer
            need = tiles.padded(head_dim) * problem.dtype.itemsize * rows
            assert need <= tiles.SHARED_BYTES[arch], (head_dim, kernel, config)


def _with_function(name: str) -> dict[str, object]:
    return {"score_function": with_functions(Case("x"), name, None, torch.float16).problem.score_function}


def test_every_row_is_legal_and_taken() -> None:
    rows = [row for rows in tiles.shipped().values() for row in rows.values()]
    text = json.loads((Path(tiles.__file__).parent / "tiles.json").read_bytes())
    assert len(rows) == len(text["tiles"]) > 150, "two rows are for the same calls"
    for row in rows:
        config = PortableTiles.parse(row.tiles)
        assert config.name == row.tiles and max(config.block_m, config.block_n) <= tuned.MAX_TILE, row
        assert row.kernel in trials.KERNELS and int(row.head_dims) <= 512, row
    masks = [
        {}, {"varlen": True}, {"seqlen_k": 64}, {"band": Band(None, 0)}, {"band": Band(9, 0)},
        {"band": Band(None, 0), "varlen": True}, {"band": Band(None, 0), "seqlen_q": 9},
        {"band": Band(None, 0), "num_heads_q": 8}, {"mask": True, "seqlen_k": 601}, {"mask": True},
        {"mask": True, "seqlen_k": 40}, _with_function("gated"), _with_function("bias"), {"aligned": False},
    ]  # fmt: skip
    usual = _problem(64, seqlen_q=4096, seqlen_k=4096, num_heads_q=2, num_heads_kv=2)
    widths, dtypes = {(int(row.head_dims),) * 2 for row in rows}, (torch.bfloat16, torch.float32, FLOAT8)
    taken = set()
    for arch, mask, dims, dtype in itertools.product(ARCHS, masks, [*widths, (192, 128)], dtypes):
        problem = usual.but(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, **mask)
        kernels = "forward", *backward.key_kernels(problem, arch), "dq", "dbias", "diagonals"
        taken |= {tiles.row_of(problem, each, arch) for each in (kernels if dtype != FLOAT8 else ["quantized"])}
    assert [row for row in rows if row not in taken] == []


def test_a_row_that_is_none_is_named() -> None:
    row = {"gpu": "sm_90", "kernel": "dq", "dtype": "16 bits", "head_dims": "64", "mask": "", "tiles": "64x64x4x3"}
    unsaid = {"table": "", "gain": 1.0, "flashtile": "", "triton": ""}
    assert tiles.parsed(json.dumps({"tiles": [row]}).encode(), unsaid)[0].tiles == "64x64x4x3"
    wrong = [{**row, "columns": 64}, {name: row[name] for name in row if name != "mask"}, {**row, "mask": ["full"]}]
    for each, why in zip([*wrong, 3], ["columns", "mask", "unhashable", "mapping"], strict=True):
        with pytest.raises(ValueError, match=f"row 2: .*{why}"):
            tiles.parsed(json.dumps({"tiles": [row, each]}).encode(), unsaid)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "group"), [(40, 1), (600, 1), (600, 2)])
def test_every_kind_of_8_bit_call_has_tiles(causal: bool, seqlen: int, group: int) -> None:
    sizes = {"num_heads_kv": 2, "num_heads_q": 2 * group}
    lengths = {"seqlen_q": seqlen, "seqlen_k": seqlen}
    problem = _problem(64, dtype=FLOAT8, band=Band(None, 0 if causal else None), **sizes, **lengths)
    for head_dim in (16, 64, 96, 160, 192, 256):
        assert quantized.choose(problem.but(head_dim=head_dim, head_dim_v=head_dim), "sm_90").block_n <= 128


def test_dk_and_dv_stand_apart_where_tiles_of_dv_do() -> None:
    assert backward.key_kernels(_problem(256), "sm_90") == ("dk", "dv")
    assert backward.key_kernels(_problem(128), "sm_90") == ("dkdv",)
    assert backward.key_kernels(_problem(256), "sm_80") == ("dkdv",)
    assert backward.key_kernels(_problem(256, dtype=torch.float32), "sm_90") == ("dkdv",)
    one = PortableTiles(16, 16, 4, 1)
    with trial(dk=one, dv=one):
        assert backward.key_kernels(_problem(128), "sm_90") == ("dk", "dv")
    with trial(dkdv=one):
        assert backward.key_kernels(_problem(256), "sm_90") == ("dkdv",)


@pytest.mark.parametrize(
    ("dims", "want"),
    [((64, 64), (64, 64)), ((33, 7), (64, 64)), ((20, 12), (32, 32)), ((8, 24), (32, 32)), ((192, 128), (256, 128)),
     ((256, 16), (256, 64)), ((16, 200), (64, 256)), ((1, 1), (16, 16))],
)  # fmt: skip
def test_tiles_of_two_swizzles_are_never_mixed(dims: tuple[int, int], want: tuple[int, int]) -> None:
    assert tiles.padded_dims(*dims) == want


@pytest.mark.parametrize(
    ("dims", "want"),
    [((64, 64), (64, 64)), ((72, 72), (96, 96)), ((97, 96), (128, 96)), ((192, 128), (192, 128)),
     ((150, 193), (192, 256)), ((33, 7), (64, 64)), ((96, 16), (96, 64)), ((40, 48), (64, 64))],
)  # fmt: skip
def test_tiles_in_parts_hold_less_than_the_next_power_of_two(dims: tuple[int, int], want: tuple[int, int]) -> None:
    assert tiles.tile_dims(_problem(dims[0], head_dim_v=dims[1])) == want


def test_tiles_of_float32_have_no_parts_of_two_swizzles() -> None:
    for dims, want in (((72, 96), (128, 128)), ((192, 96), (192, 128)), ((64, 40), (64, 64))):
        assert tiles.tile_dims(_problem(dims[0], head_dim_v=dims[1], dtype=torch.float32)) == want


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_a_mask_kind_has_its_own_tiles(kernel: str) -> None:
    full, causal = _problem(128), _problem(128, band=Band(None, 0))
    assert _choose(causal, kernel, "sm_90") == _choose(_problem(128, band=Band(9, 4)), kernel, "sm_90")
    assert kernel != "dkdv" or _choose(causal.but(varlen=True), kernel, "sm_90") != _choose(causal, kernel, "sm_90")
    featured = [{"softcap": 2.0}, {"alibi": True}, {"mask": True}, {"bias_dtype": torch.float16}, {"dropout_p": 0.1}]
    for arch in ("sm_80", "sm_90"):
        own = {_choose(causal.but(**f), kernel, arch) for f in featured}
        assert (len(own) == 1 and own != {_choose(causal, kernel, arch)}) or (arch, kernel) == ("sm_80", "dq")
    assert kernel != "dkdv" or _choose(full, kernel, "sm_90") != _choose(causal, kernel, "sm_90")


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "dbias"])
def test_tiles_ignore_batch_and_lengths(kernel: str) -> None:
    one = _problem(64)
    many = one.but(batch=512, seqlen_q=9, seqlen_k=70000, num_heads_q=64)
    assert _choose(one, kernel, "sm_90") == _choose(many, kernel, "sm_90")


@pytest.mark.parametrize("kernel", ["forward", "dk", "dv", "dq"])
def test_the_length_counts_where_all_sequences_have_it(kernel: str) -> None:
    causal = _problem(256, band=Band(None, 0), seqlen_q=1024)
    short = causal.but(seqlen_q=512)
    assert _choose(short, kernel, "sm_90") == _choose(short.but(batch=9), kernel, "sm_90")
    assert (_choose(short, kernel, "sm_90") == _choose(causal, kernel, "sm_90")) == (kernel != "forward")
    packed = causal.but(varlen=True)
    assert _choose(packed, kernel, "sm_90") == _choose(packed.but(seqlen_q=512), kernel, "sm_90")


@pytest.mark.parametrize("sizes", [(8, 16), (48, 64), (512, 64), (64, 512)])
def test_illegal_tiles_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="block_"):
        PortableTiles(*sizes, 4, 1)


def test_masking_all_blocks_takes_one_loop() -> None:
    with pytest.raises(ValueError, match="one_loop"):
        PortableTiles(64, 64, 4, 2, mask_all=True)


def test_a_trial_lasts_as_long_as_it_should() -> None:
    problem = _problem(64)
    before = _choose(problem, "dq", "sm_80")
    with trial(dq=PortableTiles(16, 16, 1, 1)):
        with trial(dq=PortableTiles(32, 32, 1, 1), forward=PortableTiles(64, 16, 1, 1)):
            assert _choose(problem, "dq", "sm_80") == PortableTiles(32, 32, 1, 1)
            assert _choose(problem, "forward", "sm_80") == PortableTiles(64, 16, 1, 1)
        assert on_trial() == (("dq", PortableTiles(16, 16, 1, 1)),)
        assert _choose(problem, "dq", "sm_80") == PortableTiles(16, 16, 1, 1)
    assert _choose(problem, "dq", "sm_80") == before


def test_a_trial_of_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel is called qd"), trial(dq=PortableTiles(16, 16, 1, 1), qd=None):
        pass
    assert not on_trial()


def test_unaligned_tensors_get_no_descriptors() -> None:
    assert _choose(_problem(64), "forward", "sm_90").tma
    assert not _choose(_problem(64, aligned=False), "forward", "sm_90").tma
    assert not _choose(_problem(20), "forward", "sm_90").tma


@pytest.mark.one_in(3)
@pytest.mark.parametrize("head_dim", [90, 60, 124])
def test_tiles_where_no_descriptor_can_read_spill_little(head_dim: int) -> None:
    made = [job for job in report.jobs("sm_90a", "portable") if f"head_dim={head_dim} " in job.label]
    assert len(made) == 4
    for outcome in report.run(made, workers=1):
        assert outcome.report is not None and not outcome.problems, outcome.problems
        assert outcome.report.spill_limit == (None if "prepare_rows" in outcome.job.label else 72)


def test_describe_names_the_tiles() -> None:
    problem = _problem(64, bias_dtype=torch.float16, bias_grad=True)
    assert BACKEND.describe(problem, "forward") == f"Triton, tiles {_choose(problem, 'forward')}"
    for kernel in ("dkdv", "dq", "dbias"):
        assert str(_choose(problem, kernel)) in BACKEND.describe(problem, "backward")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_builds_name_every_argument_once(arch: str) -> None:
    records = builds(arch)
    apart = {"attention_quantized"} if arch in ("sm_90a", "sm_100", "sm_120") else set()
    assert {r.name for r in records} == apart | {
        "attention_forward", "prepare_rows", "attention_backward_dkdv", "attention_backward_dk",
        "attention_backward_dv", "attention_backward_dq", "attention_backward_dbias", "cache_append",
        "cache_attention", "mean_of_keys", "sum_keys", "interval_bounds", "interval_bounds_dkdv", "interval_bounds_dq",
        "row_lists", "count_rows", "key_lists",
        *(f"{what}_{name}" for what in ("largest", "quantize") for name in "qkv"),
        "sum_gqa_splits_dk", "sum_gqa_splits_dv", *(f"attention_second_{each}" for each in ("rows", "dq", "dkdv")),
        "selected_backward", "selected_backward_shares", "sum_selected_dk", "sum_selected_dv",
    }  # fmt: skip
    for record in records:
        names = leaf_names(record.tree)
        assert sorted([*record.signature, *record.constexprs]) == sorted(names) == sorted(set(names)), record.label
        assert list(record.tree) == record.kernel.arg_names and len(record.tree) <= 9
        assert set(record.divisible) <= set(record.signature)
    assert builds("sm_70") == []
