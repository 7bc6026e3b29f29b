"""install: what a fresh process finds under the name flash_attn."""

from __future__ import annotations

import sys
import types

import pytest

from flashtile import InvalidInputError
from flashtile.compat import install
from tests.fresh import run

PRELUDE = "from flashtile.compat import install; import torch, sys; package = install('flash_attn')\n"


def fresh(code: str) -> str:
    """Runs code in a new process and returns what it printed."""
    return run(code, check=True).stdout.strip()


@pytest.mark.long
def test_imports_work_in_a_fresh_process() -> None:
    code = """
import importlib.util
import flash_attn
import flash_attn.flash_attn_interface as interface
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func
from flash_attn import flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input, rearrange  # the last one of einops
from flash_attn.flash_attn_interface import USE_TRITON_ROCM, _flash_attn_forward, _get_block_size_n
from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func
from flash_attn.ops.triton.rotary import apply_rotary
import flashtile.compat.flash_attn_2 as own
assert flash_attn is package and install('flash_attn') is package
assert flash_attn_func is own.flash_attn_func is interface.flash_attn_func
assert importlib.util.find_spec('flash_attn') is not None
assert importlib.util.find_spec('flash_attn.bert_padding') is not None
assert flash_attn.bert_padding.unpad_input is unpad_input
assert USE_TRITON_ROCM is False
for missing in ('flash_attn.ops.rms_norm', 'flash_attn.bert_padding.deeper', 'flash_attn_interface'):
    try:
        __import__(missing)
    except ModuleNotFoundError:
        continue
    raise SystemExit(missing)
try:
    from flash_attn import no_such_function
except ImportError:
    pass
else:
    raise SystemExit('no_such_function')
q = torch.randn(1, 5, 2, 8)
expected = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
torch.testing.assert_close(flash_attn_func(q, q, q), expected)
assert flash_attn_with_kvcache is own.flash_attn_with_kvcache is interface.flash_attn_with_kvcache
torch.testing.assert_close(flash_attn_with_kvcache(q[:, -1:], q, q, cache_seqlens=5), expected[:, -1:])
print(flash_attn.__version__)
"""
    assert fresh(PRELUDE + code) == "2.8.4+flashtile"


@pytest.mark.long
def test_flash_attention_3_is_a_package_of_its_own() -> None:
    code = """
from flashtile.compat import install
package = install('flash_attn_interface')
import importlib.util, sys, torch
import flash_attn_interface
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_combine
from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn_3.flash_attn_interface import flash_attn_func as same
import flashtile.compat.flash_attn_3 as own
assert flash_attn_interface is package is install('flash_attn_interface')
assert flash_attn_func is own.flash_attn_func is same
assert importlib.util.find_spec('flash_attn_interface') is not None
assert 'flash_attn' not in sys.modules
q = torch.randn(1, 5, 2, 8)
expected = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
torch.testing.assert_close(flash_attn_func(q, q, q), expected)
plan = get_scheduler_metadata(1, 1, 5, 2, 2, 8, torch.tensor([5], dtype=torch.int32), torch.float32)
last = flash_attn_with_kvcache(q[:, -1:], q, q, cache_seqlens=5, scheduler_metadata=plan)
torch.testing.assert_close(last, expected[:, -1:])
install('flash_attn')
import flash_attn
assert flash_attn.flash_attn_func is not flash_attn_func
print('done')
"""
    assert fresh(code) == "done"


def test_without_install_nothing_appears() -> None:
    code = "import flashtile.compat, sys; print([name for name in sys.modules if name.startswith('flash_attn')])"
    assert fresh(code) == "[]"


def test_the_real_package_is_not_replaced_once_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("flash_attn")
    real.__file__ = "/site-packages/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(RuntimeError, match="already imported from /site-packages/flash_attn/__init__.py"):
        install("flash_attn")
    assert sys.modules["flash_attn"] is real
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn_3", real)
    with pytest.raises(RuntimeError, match="^flash_attn_3 is already imported"):
        install("flash_attn_interface")
    assert "flash_attn_interface" not in sys.modules


def test_unknown_packages_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="^package: is 'xformers'"):
        install("xformers")


def test_what_compat_does_not_have_is_said_in_words() -> None:
    code = (
        "import flashtile.compat; flashtile.compat.install(); import flash_attn\n"
        "try:\n    import flash_attn.modules.mha\nexcept ModuleNotFoundError as error:\n    print(error.name, error)"
    )
    done = run(code, check=True)
    assert done.stdout.startswith("flash_attn.modules flashtile has no flash_attn.modules; it stands in for flash_attn")
    assert "flash_attn.bert_padding" in done.stdout
