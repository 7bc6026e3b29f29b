"""flashtile inside the real transformers: tiny random models against their own eager attention."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import flashtile
import flashtile.integrations.transformers as integration
from flashtile import InvalidInputError, UnsupportedError
from flashtile.integrations._transformers_mask import LazyMask
from flashtile.integrations.transformers import NAME, calls, enable, explain
from tests.rule import assert_close
from tests.slow import named, slow_but


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    """transformers knows the name, whichever test comes first."""
    enable()


_DECODER = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    attention_dropout=0.0,
)  # fmt: skip
_HYBRID = dict(head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"])
_ENCODER = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
_T5 = dict(
    vocab_size=64, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
    decoder_start_token_id=0, eos_token_id=None,
)  # fmt: skip
_WHISPER = dict(
    vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=20, max_target_positions=64,
    dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1,
    begin_suppress_tokens=None,
)  # fmt: skip
_MLA = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=2,
    n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
)  # fmt: skip
_QWEN2_MOE = dict(
    use_sliding_window=True, sliding_window=7, max_window_layers=2, num_experts=2, num_experts_per_tok=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=32,
)  # fmt: skip
_GPT_OSS = dict(
    num_local_experts=2, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
)  # fmt: skip

# Name: the class, its configuration, and how many attention calls a forward makes.
MODELS: dict[str, tuple[Any, Callable[[], Any], int]] = {
    "llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_DECODER), 2),
    "mistral": (hf.MistralForCausalLM, lambda: hf.MistralConfig(**_DECODER, sliding_window=7), 2),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**_DECODER, **_HYBRID, use_sliding_window=True), 2),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        lambda: hf.Gemma2Config(**_DECODER, **_HYBRID, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
        2,
    ),
    "gemma3": (hf.Gemma3ForCausalLM, lambda: hf.Gemma3TextConfig(**_DECODER, **_HYBRID, query_pre_attn_scalar=8), 2),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        lambda: hf.GptOssConfig(**_DECODER, **_HYBRID, **_GPT_OSS),
        2,
    ),
    # Chunks, value heads narrower than key heads, and windows that the layer does not hand on.
    "llama4": (
        hf.Llama4ForCausalLM,
        lambda: hf.Llama4TextConfig(
            **_DECODER, head_dim=16, intermediate_size_mlp=96, attention_chunk_size=8, num_local_experts=2
        ),
        2,
    ),
    "deepseek_v3": (
        hf.DeepseekV3ForCausalLM, lambda: hf.DeepseekV3Config(**_DECODER | {"num_key_value_heads": 4}, **_MLA), 2
    ),
    "qwen2_moe": (hf.Qwen2MoeForCausalLM, lambda: hf.Qwen2MoeConfig(**_DECODER, **_QWEN2_MOE), 2),
    "bert": (hf.BertForMaskedLM, lambda: hf.BertConfig(vocab_size=64, **_ENCODER), 2),
    "vit": (
        hf.ViTForImageClassification,
        lambda: hf.ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=8, **_ENCODER),
        2,
    ),
    "t5": (hf.T5ForConditionalGeneration, lambda: hf.T5Config(**_T5), 6),
    "whisper": (hf.WhisperForConditionalGeneration, lambda: hf.WhisperConfig(**_WHISPER), 6),
}  # fmt: skip
DECODERS = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "qwen2_moe"]
BATCH, SEQLEN = 2, 19


def make(name: str, **changes: Any) -> nn.Module:
    """The model with weights large enough that scores differ, in training mode; nothing in it drops."""
    torch.manual_seed(0)
    kind, configure, _ = MODELS[name]
    config = configure()
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
    return model.train()


def inputs(name: str, padding: str = "none") -> dict[str, Tensor]:
    """Random inputs. The first row is padded by 5 tokens, on the side that ``padding`` says."""
    rand = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 64, (BATCH, SEQLEN), generator=rand)
    kept = torch.ones_like(tokens)
    if padding != "none":
        kept[0, slice(0, 5) if padding == "left" else slice(-5, None)] = 0
    given = {"attention_mask": kept} if padding != "none" else {}
    if name == "vit":
        return {"pixel_values": torch.randn(BATCH, 1, 16, 16, generator=rand)}
    if name == "whisper":
        features = {"input_features": torch.randn(BATCH, 8, 40, generator=rand), "decoder_input_ids": tokens}
        return features | ({"decoder_attention_mask": kept} if padding != "none" else {})
    if name == "t5":
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :11]} | given
    return {"input_ids": tokens} | given


def results(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The logits of tokens that are not padding, and the gradients of all parameters."""
    dtype = next(model.parameters()).dtype
    given = {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}
    model.zero_grad()
    logits = model(**given).logits
    side = "decoder_attention_mask" if "decoder_input_ids" in given else "attention_mask"
    if side in given:
        logits = logits[given[side].bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights.to(logits)).sum().backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": logits.detach()} | grads


@contextlib.contextmanager
def softmax_in_float64() -> Iterator[None]:
    """Models ask for a softmax in float32, even in float64, where it makes NaN of the mask's least finite number."""
    softmax = nn.functional.softmax

    def in_float64(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    with mock.patch.object(nn.functional, "softmax", in_float64):
        yield


def compare_together(got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """In 8 bits of precision single elements go astray: the norms of the logits' and of all gradients' errors."""
    for keys in (["logits"], [key for key in got if key != "logits"]):
        error, allowed = (torch.cat([(x[key] - exact[key]).flatten() for key in keys]).norm() for x in (got, plain))
        assert error <= 2 * allowed


def judge(
    model: nn.Module,
    given: dict[str, Any],
    served: int,
    change: Callable[[Any], Any] = lambda _: None,
    by: Callable[..., None] | None = None,
) -> None:
    """Eager attention and flashtile in float32 against eager attention in float64, compared by ``assert_close``.

    flashtile's model is ``change``d; by: a comparison of other results than that of the CPU, by norms.
    """
    wide, plain = copy.deepcopy(model).double(), results(model, given)
    enable(model)
    change(model)
    calls.clear()
    got = results(model, given)
    assert (calls.served, calls.left.total()) == (served, 0)
    assert got.keys() == plain.keys()
    with softmax_in_float64():
        if by is None:
            assert_close(got, lambda: results(wide, given), plain, torch.float32)
        else:
            by(got, results(wide, given), plain)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "bert", "t5", "whisper"])
def test_forward_and_gradients(name: str, padding: str) -> None:
    judge(make(name), inputs(name, padding), MODELS[name][2])


def test_forward_and_gradients_of_images() -> None:
    judge(make("vit"), inputs("vit"), 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(MODELS))
def test_gradient_checkpointing(name: str) -> None:
    """The forward of each layer runs twice."""
    given = inputs(name, "none" if name == "vit" else "right")
    judge(make(name), given, 2 * MODELS[name][2], lambda model: model.activation_checkpointing_enable())


def test_reentrant_and_offloaded_checkpointing() -> None:
    reentrant = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    for given in (reentrant, {"offload": True} if torch.cuda.is_available() else {"every_n_layers": 2}):
        served = 4 if given is reentrant else 3
        change = lambda model: model.activation_checkpointing_enable(**given)  # noqa: B023, E731
        judge(make("mistral"), inputs("mistral", "left"), served, change)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_generate(name: str, cache: str) -> None:
    model, given = make(name).eval(), inputs(name, "left")
    given = {key: x for key, x in given.items() if not key.startswith("decoder")}
    if name == "gemma2" and cache == "dynamic":
        given["input_ids"], given["attention_mask"] = (given[key][:, :9] for key in ("input_ids", "attention_mask"))

    def generate() -> Tensor:
        kind = {} if cache == "dynamic" else {"cache_implementation": cache}
        return model.generate(**given, max_new_tokens=12, do_sample=False, **kind)

    want = generate()
    enable(model)
    calls.clear()
    assert torch.equal(generate(), want)
    encoder = 2 if name in ("t5", "whisper") else 0
    assert calls.served == encoder + 12 * (MODELS[name][2] - encoder)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}], ids=str)
def test_generate_otherwise(how: dict[str, Any]) -> None:
    model, given = make("mistral").eval(), inputs("mistral", "none" if "prompt_lookup_num_tokens" in how else "left")
    given = {key: x[1:] for key, x in given.items()} if "prompt_lookup_num_tokens" in how else given
    want = model.generate(**given, max_new_tokens=9, do_sample=False, **how)
    enable(model)
    assert torch.equal(model.generate(**given, max_new_tokens=9, do_sample=False, **how), want)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "padding"), [("llama", "left"), ("llama", "none"), ("gemma3", "left")])
def test_generate_compiled(name: str, padding: str) -> None:
    """What ``generate`` does with a static cache on a GPU: each decoding step is one graph."""
    model, given = make(name).eval(), inputs(name, padding)
    want = model.generate(**given, max_new_tokens=9, do_sample=False)
    enable(model)
    torch._dynamo.reset()
    how = hf.CompileConfig(backend="eager", fullgraph=True, mode=None)
    how._compile_all_devices = True
    calls.clear()
    got = model.generate(**given, max_new_tokens=9, do_sample=False, cache_implementation="static", compile_config=how)
    assert torch.equal(got, want)
    assert calls.served == 9 * MODELS[name][2]  # the prompt, and eight compiled steps


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("mistral", 2), ("gemma3", 2), ("llama4", 0)])
def test_a_static_cache_goes_by_lengths(name: str, layers: int, hole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths stay on the device, and keys are split among programs, unless padding is not on the left."""
    model, given = make(name).eval(), inputs(name, "left")
    given["attention_mask"][:, -3] &= not hole
    want = model.generate(**given, max_new_tokens=9, do_sample=False)
    enable(model)
    over = mock.Mock(wraps=flashtile.attention_with_kvcache)
    monkeypatch.setattr(flashtile, "attention_with_kvcache", over)
    assert torch.equal(model.generate(**given, max_new_tokens=9, do_sample=False, cache_implementation="static"), want)
    if name == "llama" or not hole:  # a window leaves the hole behind
        assert over.call_count == (0 if hole else 8 * layers)


def test_a_prompt_in_two_parts() -> None:
    """A cache that holds some tokens and several more queries, with a window, of a static cache and of none."""
    for name in ("mistral", "gemma3", "llama4"):
        for static in (False, True):
            model = make(name).eval()
            tokens = inputs(name)["input_ids"]
            want = model(tokens).logits[:, 11:]
            enable(model)
            cache = hf.StaticCache(config=model.config, max_cache_len=32) if static else None
            with torch.no_grad():
                first = model(tokens[:, :11], past_key_values=cache, use_cache=True)
                got = model(tokens[:, 11:], past_key_values=first.past_key_values).logits
            torch.testing.assert_close(got, want)


@pytest.mark.long
@pytest.mark.parametrize("name", slow_but(["gemma3", "llama", "bert"], named("gemma3")))
def test_compile(name: str) -> None:
    """The whole graph, as with transformers' own attention; its attention is flashtile's operator."""
    found: list[str] = []

    def backend(graph: Any, examples: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    def change(model: Any) -> None:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)

    judge(make(name), inputs(name, "left"), 2, change)
    assert sum("flashtile.attention_forward" in target for target in found) == 2
    assert not any("scaled_dot_product" in target for target in found)


@pytest.mark.slow
def test_compiled_layers_and_export() -> None:
    """A mask that is made outside of a graph enters it; ``torch.export`` takes the whole model."""
    model, given = make("mistral").eval(), inputs("mistral", "left") | {"use_cache": False}
    enable(model)
    want = model(**given).logits
    exported = torch.export.export(model, (), given).module()
    torch.testing.assert_close(exported(**given).logits, want)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(**given).logits, want)


LENGTHS = (5, 1, 10, 3)


def packed(name: str) -> dict[str, Any]:
    """All tokens of the batch's first row as four sequences, by their positions."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": inputs(name)["input_ids"][:1], "position_ids": positions, "use_cache": False}


def bounds() -> dict[str, Any]:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 10, "max_length_k": 10}


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_sequences(name: str, by: str) -> None:
    """Each sequence gets what it gets alone, through ``attention_varlen`` and with no mask written out."""
    model, given = make(name).eval(), packed(name) | (bounds() if by == "cu_seq_lens" else {})
    alone = given["input_ids"].split(LENGTHS, 1)
    plain = torch.cat([model(tokens).logits for tokens in alone], 1)
    wide = copy.deepcopy(model).double()
    enable(model)
    if (name, by) == ("gpt_oss", "position_ids"):
        with pytest.raises(UnsupportedError, match="^position_ids: are those of packed sequences"):
            model(**given)
        return
    with mock.patch.object(LazyMask, "dense", side_effect=AssertionError):
        got = model(**given).logits
        text = explain(model, **given)
    with softmax_in_float64():
        exact = lambda: {"logits": torch.cat([wide(tokens).logits for tokens in alone], 1)}  # noqa: E731
        assert_close({"logits": got}, exact, {"logits": plain}, torch.float32)
    assert text.count("packed sequences (varlen)") == text.count("forward:") and "up to 10 x 10" in text


@pytest.mark.parametrize("more", [{"use_cache": True}, {"attention_mask": torch.ones(1, SEQLEN, dtype=torch.long)}])
def test_packed_positions_that_the_mask_does_not_show_are_refused(more: dict[str, Any]) -> None:
    model, given = make("llama").eval(), packed("llama")
    want = model(**given).logits
    enable(model)
    with pytest.raises(UnsupportedError, match="^position_ids: are those of packed sequences"):
        model(**given | more)
    torch.testing.assert_close(model(**given | more | bounds()).logits, want)
    # A buffer of positions that served before is looked at again once it was written to.
    positions = torch.arange(SEQLEN)[None]
    looking = mock.patch.object(
        integration, "find_packed_sequence_indices", wraps=integration.find_packed_sequence_indices
    )
    with looking as look:
        model(**given | more | {"position_ids": positions})
    look.assert_called_once()  # for both layers
    positions.copy_(given["position_ids"])
    with pytest.raises(UnsupportedError, match="^position_ids: are those of packed sequences"):
        model(**given | more | {"position_ids": positions})


def test_packed_sequences_of_several_rows() -> None:
    model = make("mistral")
    given = packed("mistral")
    rows = torch.cat([given["position_ids"], torch.arange(SEQLEN)[None]])
    judge(model, {"input_ids": inputs("mistral")["input_ids"], "position_ids": rows, "use_cache": False}, 2)


@pytest.mark.long
def test_packed_sequences_compiled() -> None:
    """Under torch.compile positions cannot be looked at, but bounds that are given still make a packed call."""
    model, given = make("llama").eval(), packed("llama")
    enable(model)
    want = model(**given).logits
    for more in ({}, bounds()):
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        with mock.patch.object(LazyMask, "dense", side_effect=AssertionError) if more else contextlib.nullcontext():
            torch.testing.assert_close(compiled(**given, **more).logits, want)


def test_bounds_join_other_masks() -> None:
    """cu_seq_lens with a mask that has to be written out: a key must be allowed by both."""
    model, given = make("llama").eval(), packed("llama")
    enable(model)
    want = model(**given).logits
    square = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(square.shape).masked_fill(~square, -torch.inf)
    for attention_mask in (square, additive):
        torch.testing.assert_close(model(**given, **bounds(), attention_mask=attention_mask).logits, want)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "t5"])
def test_autocast(name: str) -> None:
    """Attention runs in autocast's dtype, even if a norm left q and k in float32. At most twice eager's error."""
    model, given = make(name), inputs(name, "right")
    with softmax_in_float64():
        exact = results(copy.deepcopy(model).double(), given)
    with torch.autocast("cpu", torch.bfloat16):
        plain = results(model, given)
        enable(model)
        calls.clear()
        got = results(model, given)
        assert calls.served == MODELS[name][2]
        text = explain(model, **given)
    assert "bfloat16 on cpu" in text and "float32 on cpu" not in text
    assert {key: x.dtype for key, x in got.items()} == {key: x.dtype for key, x in plain.items()}
    compare_together(got, exact, plain)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_masks_of_the_user(form: str) -> None:
    """A mask of four dimensions is the whole mask: nothing causal is added to it."""
    keep = torch.rand(BATCH, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(3)) > 0.4
    keep |= torch.eye(SEQLEN, dtype=torch.bool)
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    tokens = inputs("llama")["input_ids"]
    model = make("llama").eval()
    want = model(tokens, attention_mask=additive).logits
    enable(model)
    torch.testing.assert_close(model(tokens, attention_mask=keep if form == "bool" else additive).logits, want)


def test_masks_of_three_dimensions_are_refused() -> None:
    """They would broadcast by accident; transformers' own attention fails on them."""
    model = make("llama").eval()
    enable(model)
    for shape in ((BATCH, 1, SEQLEN), (BATCH, SEQLEN, SEQLEN)):
        with pytest.raises(InvalidInputError, match="attention_mask: has 3 dimensions, must have 2"):
            model(inputs("llama")["input_ids"], attention_mask=torch.ones(shape, dtype=torch.bool))


def test_bidirectional_decoder() -> None:
    """``config.is_causal = False``; the layers of Llama still call themselves causal."""
    for padding in ("none", "left"):
        judge(make("llama", is_causal=False), inputs("llama", padding) | {"use_cache": False}, 2)


class Layer(nn.Module):
    """What ``attention`` reads of a layer."""

    is_causal = True


def tensors(seqlen_q: int, seqlen_k: int, heads: int = 4) -> list[Tensor]:
    make = torch.Generator().manual_seed(5)
    shapes = (BATCH, heads, seqlen_q, 8), (BATCH, 2, seqlen_k, 8), (BATCH, 2, seqlen_k, 8)
    return [torch.randn(shape, generator=make) for shape in shapes]


def run(mask: Any, seqlen_q: int = 6, seqlen_k: int = 6, training: bool = False, **kwargs: Any) -> Tensor:
    return integration.attention(Layer().train(training), *tensors(seqlen_q, seqlen_k), mask, **kwargs)[0]


@pytest.mark.parametrize("padding", ["none", "left", "right", "short"])
@pytest.mark.parametrize("window", [None, 1, 4, 8, 50])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_described_masks_are_the_written_ones(kind: str, window: int | None, padding: str) -> None:
    """Whatever the mask function leaves undrawn, the layer attends as with transformers' own tensor."""
    from transformers import masking_utils

    maker = (
        "create_"
        + {
            ("causal", False): "causal_mask",
            ("causal", True): "sliding_window_causal_mask",
            ("bidirectional", False): "bidirectional_mask",
            ("bidirectional", True): "bidirectional_sliding_window_mask",
        }[kind, window is not None]
    )
    config = hf.LlamaConfig(sliding_window=window, attn_implementation=NAME)
    layer = Layer()
    layer.is_causal = kind != "causal"  # the mask counts, not the layer
    # Queries, keys, and where the queries start: a prompt, one token, a continued prompt, a static cache half full.
    for seqlen_q, seqlen_k, q_offset in ((9, 9, 0), (1, 9, 8), (4, 9, 5), (4, 9, 0), (4, 9, 3), (1, 9, 3)):
        if kind == "bidirectional" and seqlen_q != seqlen_k:
            continue
        kept = torch.ones(BATCH, 9 if padding != "short" else 6, dtype=torch.long)
        kept[0, slice(0, 3) if padding == "left" else slice(4, None)] = 0
        cache = mock.Mock(is_compileable=False, is_sliding=[True], is_linear=[False], is_dummy=[False])
        cache.get_query_offset.return_value, cache.get_mask_sizes.return_value = q_offset, (seqlen_k, 0)
        given = dict(
            config=config, inputs_embeds=torch.empty(BATCH, seqlen_q, 8), past_key_values=cache,
            attention_mask=None if padding == "none" else kept,
        )  # fmt: skip
        made = getattr(masking_utils, maker)(**given)
        config._attn_implementation = "eager"
        written = getattr(masking_utils, maker)(**given)
        config._attn_implementation = NAME
        got = integration.attention(layer, *tensors(seqlen_q, seqlen_k), made)[0]
        if written is None:
            written = torch.zeros(BATCH, 1, seqlen_q, seqlen_k)
        want = integration.attention(layer, *tensors(seqlen_q, seqlen_k), written == 0)[0]
        torch.testing.assert_close(got, want)
        if isinstance(made, LazyMask):
            assert torch.equal(made[:, :, :, :seqlen_k], written == 0)
            assert torch.equal(torch.where(made, 0.0, -1.0) == 0, written == 0) and made.shape == written.shape


def test_joined_masks_are_written_out() -> None:
    config = hf.LlamaConfig(attn_implementation=enable())
    given = dict(config=config, inputs_embeds=torch.empty(1, 9, 8), attention_mask=None, past_key_values=None)
    made = create_causal_mask(**given, or_mask_function=lambda b, h, q, k: (q < 4) & (k < 4))
    want = torch.ones(9, 9, dtype=torch.bool).tril()
    want[:4, :4] = True
    assert type(made) is Tensor and torch.equal(made, want[None, None])
    tril, keep_all = torch.ones(9, 9, dtype=torch.bool).tril(), lambda b, h, q, k: q >= 0
    for function, size, seqlen_k, q_offset, flags in (
        (sliding_window_causal_mask_function(3), 3, 9, 0, {}),  # not said to be plain
        (sliding_window_causal_mask_function(3), 3, 9, 0, {"allow_is_causal_skip": True}),  # not the config's window
        (keep_all, None, 9, 0, {"allow_is_causal_skip": True}),
        (causal_mask_function, None, 6, 3, {"allow_is_causal_skip": True}),  # queries after the last key
    ):
        made = integration.mask(
            1, 9, seqlen_k, q_offset, mask_function=function, local_size=size, device="cpu", **flags
        )
        want = tril.triu(-2) if size else torch.ones_like(tril) if function is keep_all else tril
        want = want if seqlen_k == 9 else torch.ones(9, 6, dtype=torch.bool).tril(3)
        assert torch.equal(made[0, 0], want) and type(made) is Tensor
    # Queries at the first keys, where a window of flashtile would have them at the last.
    config = mock.Mock(sliding_window=2, attention_chunk_size=None)
    given = dict(mask_function=sliding_window_bidirectional_mask_function(2), local_size=2, config=config, device="cpu")
    made = integration.mask(1, 3, 9, allow_is_bidirectional_skip=True, **given)
    assert type(made) is Tensor and torch.equal(made[0, 0], torch.ones(3, 9, dtype=torch.bool).tril(2).triu(-2))
    with mock.patch("flashtile.integrations._transformers_mask.is_tracing", return_value=True):
        both = and_masks(causal_mask_function, keep_all)
        assert type(integration.mask(1, 9, 9, mask_function=both, use_vmap=True)) is Tensor


def test_chunks_are_not_windows() -> None:
    config = hf.Llama4TextConfig(attention_chunk_size=4, sliding_window=4, attn_implementation=enable())
    given = dict(config=config, inputs_embeds=torch.empty(1, 9, 8), attention_mask=None, past_key_values=None)
    rows = torch.arange(9)
    want = (rows[:, None] >= rows) & (rows[:, None] // 4 == rows // 4)
    made = create_chunked_causal_mask(**given)
    assert type(made) is Tensor and torch.equal(made, want[None, None])


def test_chunks_are_handed_on_where_the_first_key_begins_one() -> None:
    config = hf.Llama4TextConfig(attention_chunk_size=4, attn_implementation=enable())
    given = dict(config=config, inputs_embeds=torch.empty(2, 9, 8), past_key_values=None)
    rows = torch.arange(9)
    want = ((rows[:, None] >= rows) & (rows[:, None] // 4 == rows // 4)).expand(2, 1, 9, 9)
    made = create_chunked_causal_mask(**given, attention_mask=None)
    assert isinstance(made, LazyMask) and made.chunk == 4 and made.window is None and made.causal
    assert torch.equal(made.dense(), want) and torch.equal(run(made, 9, 9), run(want, 9, 9))
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, 6:] = False
    behind = create_chunked_causal_mask(**given, attention_mask=padding)
    assert isinstance(behind, LazyMask) and behind.chunk == 4
    assert torch.equal(run(behind, 9, 9)[1, :6], run(want, 9, 9)[1, :6])
    padding[1] = padding[1].flip(0)  # chunks of the second row begin after its padding
    assert type(create_chunked_causal_mask(**given, attention_mask=padding)) is Tensor


def test_lazy_masks_move() -> None:
    keys = torch.ones(1, 9, dtype=torch.bool)
    keys[0, 7:] = False
    made = integration.mask(1, 9, 9, attention_mask=keys, allow_is_causal_skip=True)
    assert isinstance(made, LazyMask)
    moved = made.to("meta", non_blocking=True)
    assert isinstance(moved, LazyMask) and moved.keys is not None and moved.keys.is_meta and moved.dense().is_meta
    assert not made.dense().is_meta
    want = keys[0] & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(made.to(torch.float32), want[None, None].float())
    assert torch.equal(copy.copy(made).dense(), want[None, None])
    config = hf.LlamaConfig(attn_implementation=enable())
    given = dict(config=config, inputs_embeds=torch.empty(1, 4, 8), attention_mask=None, past_key_values=None)
    packed_rows = create_causal_mask(**given, position_ids=torch.tensor([[0, 1, 0, 1]]))
    assert packed_rows.bounds()[0].tolist() == [0, 2, 4]
    with mock.patch.object(LazyMask, "bounds", lambda self: self._bounds):
        assert packed_rows.to("meta").bounds() is None  # to be found on the new device


def test_windows_of_a_layer_without_a_mask() -> None:
    """``sliding_window=w`` is w keys with the query's own; without causal also w - 1 keys after it."""
    band = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)[None, None]
    assert torch.equal(run(None, sliding_window=3), run(band))
    both = torch.ones(6, 6, dtype=torch.bool).tril(2).triu(-2)[None, None]
    assert torch.equal(run(None, sliding_window=3, is_causal=False), run(both))
    torch.testing.assert_close(run(None, 1, 6, sliding_window=3), run(band[:, :, -1:], 1, 6))
    full = integration.mask(BATCH, 1, 6, 5, allow_is_causal_skip=True)  # a mask counts more than the layer
    assert torch.equal(run(full, 1, 6, sliding_window=3), run(None, 1, 6))


def test_dropout_in_training_alone() -> None:
    plain = run(None)
    assert torch.equal(run(None, dropout=0.5), plain)
    torch.manual_seed(0)
    first = run(None, training=True, dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(first, plain) and torch.equal(run(None, training=True, dropout=0.5), first)
    with torch.no_grad():  # calls over a cache drop nothing
        mask = integration.mask(BATCH, 1, 6, torch.tensor(3))
        assert isinstance(mask, LazyMask) and torch.equal(run(mask, 1, 6), run(mask.dense(), 1, 6))
        assert not torch.equal(run(mask, 1, 6, training=True, dropout=0.5), run(mask, 1, 6))


def test_deterministic_algorithms_are_passed_on() -> None:
    seen = []
    for given, everywhere in ((False, False), (True, False), (False, True)):
        torch.use_deterministic_algorithms(everywhere)
        try:
            with mock.patch.object(integration.flashtile, "attention", wraps=integration.flashtile.attention) as spy:
                run(None, deterministic=given)
        finally:
            torch.use_deterministic_algorithms(False)
        seen.append(spy.call_args.kwargs["deterministic"])
    assert seen == [False, True, True]


def test_bias_has_a_gradient_beside_any_mask() -> None:
    bias = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    keep = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    grads = []
    for mask in (None, keep, torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)):
        grads.append(torch.autograd.grad(run(mask, position_bias=bias).square().sum(), bias)[0])
    assert grads[0].abs().max() > 0.01
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def test_bias_beside_described_masks() -> None:
    """Packed sequences, and a cache that is not full: each as with the mask written out."""
    bias = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    config = hf.LlamaConfig(attn_implementation=enable())
    given = dict(config=config, inputs_embeds=torch.empty(BATCH, 6, 8), attention_mask=None, past_key_values=None)
    packed_rows = create_causal_mask(**given, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]))
    half_full = integration.mask(BATCH, 3, 6, torch.tensor(1), allow_is_causal_skip=True, device="cpu")
    assert packed_rows.packed and half_full.seqlen_k == 4
    for lazy in (packed_rows, half_full):
        rows = lazy.shape[2]
        got, want = (run(mask, rows, position_bias=bias[:, :, :rows]) for mask in (lazy, lazy.dense()))
        torch.testing.assert_close(got, want)


def test_bounds_beside_padding() -> None:
    keys = torch.ones(BATCH, 6, dtype=torch.bool)
    keys[:, 0] = False
    lazy = integration.mask(BATCH, 6, 6, attention_mask=keys, allow_is_causal_skip=True, device="cpu")
    cu_seqlens = torch.tensor([0, 4, 6, 12])
    same = torch.zeros(BATCH, 1, 6, 6, dtype=torch.bool)
    same[0, 0, :4, :4] = same[0, 0, 4:, 4:] = same[1] = True
    got = run(lazy, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
    torch.testing.assert_close(got, run(lazy.dense() & same))
    short = run(lazy, cu_seq_lens_q=cu_seqlens[:2], cu_seq_lens_k=cu_seqlens[:2])  # the other rows are in no sequence
    same[0, 0, 4:] = same[1] = False
    torch.testing.assert_close(short, run(lazy.dense() & same))


REFUSED = {
    "output_attentions": ("output_attentions", None, {"output_attentions": True}),
    "head_mask": ("head_mask", None, {"head_mask": torch.ones(4)}),
    "paged cache": ("cache", None, {"cache": object()}),
    "unknown": ("novel", None, {"novel": 3}),
    "a tensor of two dimensions": ("attention_mask", torch.ones(BATCH, 6, dtype=torch.bool), {}),
    "one side of the bounds": ("cu_seq_lens_k", None, {"cu_seq_lens_q": torch.tensor([0, 12])}),
    "bias of packed sequences": (
        "position_bias", None, bounds() | {"position_bias": torch.zeros(1, 4, 6, 6)},
    ),
    "a mask of another shape": ("attention_mask", integration.mask(BATCH, 7, 7, allow_is_causal_skip=True), {}),
    "integer mask": ("attention_mask", torch.ones(BATCH, 1, 6, 6, dtype=torch.long), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_not_understood_is_refused(case: str) -> None:
    names, mask, kwargs = REFUSED[case]
    with pytest.raises((InvalidInputError, UnsupportedError), match=f"^{names}: "):
        run(mask, **kwargs)


def test_causal_without_a_mask_is_square() -> None:
    with pytest.raises(UnsupportedError, match="causal attention of 3 queries to 6 keys without a mask"):
        run(None, 3, 6)


def test_harmless_keywords() -> None:
    given = dict.fromkeys(integration.HARMLESS, 1) | {"output_attentions": False, "anything": None}
    assert torch.equal(run(None, **given), run(None))


def test_attention_weights_are_refused() -> None:
    model = make("llama").eval()
    enable(model)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    with pytest.raises(UnsupportedError, match="attention weights"):
        model(**inputs("llama"), output_attentions=True)


def test_models_that_compute_their_own_attention_are_refused() -> None:
    config = hf.XLNetConfig(vocab_size=16, d_model=16, n_layer=1, n_head=2, d_inner=16)
    with pytest.raises(UnsupportedError, match="XLNetModel"):
        enable(hf.XLNetModel(config))
    config = hf.LongT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedError, match="LongT5Model"):  # its masks are for eager attention alone
        enable(hf.LongT5Model(config))
    with pytest.raises(UnsupportedError, match="a Linear"):
        enable(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="a type is no PreTrainedModel and holds none to switch$"):
        enable(hf.LlamaForCausalLM)


def test_one_line_switches_a_model_and_another_one_back() -> None:
    tokens = inputs("llama")["input_ids"]
    loaded = hf.AutoModelForCausalLM.from_config(MODELS["llama"][1](), attn_implementation=enable())
    assert loaded.config._attn_implementation == NAME
    calls.clear()
    loaded(tokens)
    assert str(calls) == "2 calls ran with flashtile, 0 were left"
    loaded.set_attn_implementation("sdpa")
    loaded(tokens)
    assert calls.served == 2


def test_explain() -> None:
    model = make("gemma3").eval()
    enable(model)
    text = explain(model, **inputs("gemma3"))
    assert text.count("1 x float32 on cpu, batch 2, 19 x 19, 4 heads over 2, head_dim 16") == 2
    assert "window(6, 0)" in text and "forward: cpu" in text
    assert explain(nn.Linear(2, 2), torch.ones(2)) == "no attention call reached flashtile"


def test_compiled_layers_are_counted_and_explained() -> None:
    """A layer of each kind: a second run counts without being traced."""
    model, given = make("llama").eval(), inputs("llama")
    enable(model)
    want = explain(model, **given)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    calls.clear()
    assert explain(model, **given) == want
    assert calls.served == 2
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        model(**given)
    assert calls.served == 4
