"""flashtile as a backend of diffusers: tiny random models against the native backend, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor, nn

from flashtile import UnsupportedError
from flashtile.integrations import diffusers as integration
from flashtile.integrations import sdpa
from tests.rule import assert_close

REGISTRY = attention_dispatch._AttentionBackendRegistry
NATIVE = attention_dispatch.AttentionBackendName.NATIVE
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    integration.calls.clear()
    REGISTRY.set_active_backend(NATIVE)
    yield
    integration.disable()
    assert not sdpa.is_enabled()
    REGISTRY.set_active_backend(NATIVE)  # which set_attention_backend changes, and reset_attention_backend does not


def reset(model: nn.Module) -> None:
    model.reset_attention_backend()
    REGISTRY.set_active_backend(NATIVE)


def flux() -> tuple[nn.Module, Inputs]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    sizes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 12, 32), "pooled_projections": (1, 32)}
    return model, normal(sizes) | {
        "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(12, 3),
    }  # fmt: skip


def wan() -> tuple[nn.Module, Inputs]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    sizes = {"hidden_states": (1, 4, 2, 8, 8), "encoder_hidden_states": (1, 6, 16)}
    return model, normal(sizes) | {"timestep": torch.tensor([3])}


def qwen() -> tuple[nn.Module, Inputs]:
    """Its text mask becomes one of keys, ``(batch, seqlen_k)``."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    sizes = {"hidden_states": (2, 16, 16), "encoder_hidden_states": (2, 7, 16)}
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    return model, normal(sizes) | {
        "timestep": torch.tensor([0.5, 0.7]), "encoder_hidden_states_mask": keep, "img_shapes": [[(1, 4, 4)]] * 2,
    }  # fmt: skip


def unet() -> tuple[nn.Module, Inputs]:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    return model, normal({"sample": (2, 4, 8, 8), "encoder_hidden_states": (2, 6, 16)}) | {
        "timestep": torch.tensor([3]), "encoder_attention_mask": keep,
    }  # fmt: skip


def sd3() -> tuple[nn.Module, Inputs]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    sizes = {"hidden_states": (2, 4, 4, 4), "encoder_hidden_states": (2, 7, 16), "pooled_projections": (2, 16)}
    return model, normal(sizes) | {"timestep": torch.tensor([3, 4])}


def vae() -> tuple[nn.Module, Inputs]:
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), normal({"sample": (1, 3, 8, 8)})


def normal(sizes: dict[str, tuple[int, ...]]) -> Inputs:
    return {name: torch.randn(shape) for name, shape in sizes.items()}


def run(model: nn.Module, inputs: Inputs, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The output and the gradients of all parameters."""
    cast = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
    out = model.to(dtype)(**cast, return_dict=False)[0]
    grads = torch.autograd.grad(out.square().mean(), tuple(model.parameters()), allow_unused=True)
    model.float()
    found = zip((name for name, _ in model.named_parameters()), grads, strict=True)
    return {"out": out.detach(), **{name: x for name, x in found if x is not None}}


def judge(got: dict[str, Tensor], model: nn.Module, inputs: Inputs) -> None:
    """The error rule, against the native backend in float64."""
    plain = run(model, inputs)
    assert got.keys() == plain.keys()
    assert_close(got, lambda: run(model, inputs, torch.float64), plain, torch.float32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("make", "count"), [(flux, 2), (wan, 2), (qwen, 1), (unet, 8), (sd3, 1), (vae, 2)])
def test_enable_serves_every_attention(make: Callable[[], tuple[nn.Module, Inputs]], count: int) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    integration.enable()
    integration.enable()
    got = run(model, inputs)
    assert (integration.calls.served, integration.calls.left.total()) == (count, 0), integration.calls
    integration.disable()
    assert REGISTRY._active_backend is NATIVE
    judge(got, model, inputs)
    assert integration.calls.served == count


@pytest.mark.parametrize(("make", "count"), [(flux, 2), (qwen, 1), (unet, 0), (sd3, 0)])
def test_a_model_is_given_the_backend_by_name(make: Callable[[], tuple[nn.Module, Inputs]], count: int) -> None:
    """As in diffusers, the name reaches no attention that calls PyTorch's function itself."""
    torch.manual_seed(0)
    model, inputs = make()
    integration.register()
    model.set_attention_backend("flashtile")
    got = run(model, inputs)
    assert (integration.calls.served, integration.calls.left.total()) == (count, 0)
    reset(model)
    judge(got, model, inputs)
    assert integration.calls.served == count


def test_a_backend_that_a_model_was_given_stays() -> None:
    torch.manual_seed(0)
    model, inputs = flux()
    model.set_attention_backend("_native_math")
    integration.enable()
    run(model, inputs)
    assert integration.calls.served == 0 and list(integration.calls.left.values()) == [2]
    assert "sdpa_kernel" in str(integration.calls)


def test_the_context_manager_of_diffusers_knows_the_name() -> None:
    torch.manual_seed(0)
    model, inputs = flux()
    integration.register()
    with diffusers.attention_backend("flashtile"):
        got = run(model, inputs)
    assert integration.calls.served == 2
    judge(got, model, inputs)


@pytest.mark.long
def test_compiled_model_calls_the_operator() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = flux()
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    integration.register()
    model.set_attention_backend("flashtile")
    with torch.no_grad():
        compiled = torch.compile(model, backend=note, fullgraph=True)(**inputs, return_dict=False)[0]
        eager = model(**inputs, return_dict=False)[0]
        reset(model)
        plain = model(**inputs, return_dict=False)[0]
    assert sum("flashtile.attention_forward" in name for name in seen) == 2
    for out in (compiled, eager):
        assert_close({"out": out}, lambda: run(model, inputs, torch.float64), {"out": plain}, torch.float32)


Q = torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "keywords",
    [
        {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.arange(6) < torch.tensor([[6], [3]])},
        {"attn_mask": Q[:1, :, 0, :6]}, {"attn_mask": Q[:, None, :, 0, :6]}, {"enable_gqa": True},
    ],
    ids=["plain", "causal", "scale", "mask of keys", "square bias", "bias", "gqa"],
)  # fmt: skip
@pytest.mark.parametrize("checks", [False, True])
def test_dispatched_call_is_the_native_one(
    keywords: dict[str, Any], checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REGISTRY, "_checks_enabled", checks)
    integration.register()
    kv = Q[:, :, :2].flip(1) if "enable_gqa" in keywords else Q.flip(1)

    def call(backend: str, dtype: torch.dtype) -> Tensor:
        cast = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in keywords.items()}
        tensors = (x.to(dtype) for x in (Q, kv, kv))
        return attention_dispatch.dispatch_attention_fn(*tensors, **cast, backend=backend)

    got, plain = call("flashtile", torch.float32), call("native", torch.float32)
    assert integration.calls.served == 1 and got.shape == plain.shape
    assert_close({"out": got}, lambda: {"out": call("native", torch.float64)}, {"out": plain}, torch.float32)


def test_what_it_cannot_run_is_an_error() -> None:
    integration.register()

    def call(**keywords: Any) -> Tensor:
        return attention_dispatch.dispatch_attention_fn(Q, Q, Q, backend="flashtile", **keywords)

    for keywords, reason in (
        ({"attn_mask": Q[:1, :, 0, :6] > 0, "is_causal": True}, "attn_mask together with is_causal"),
        ({"dropout_p": 1.0}, "dropout_p 1.0"),
        ({"attention_kwargs": {"return_lse": True}}, "return_lse"),
        ({"parallel_config": diffusers.ParallelConfig()}, "context parallelism"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            call(**keywords)
    assert integration.calls.served == 0


def test_diffusers_refuses_it_for_context_parallelism() -> None:
    model, _ = flux()
    for block in model.transformer_blocks:
        block.attn.processor._parallel_config = diffusers.ParallelConfig()
    integration.register()
    with pytest.raises(ValueError, match="'flashtile' does not support context parallelism"):
        model.set_attention_backend("flashtile")


@pytest.mark.parametrize("change", ["version", "structure"])
def test_other_releases_are_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "version":
        monkeypatch.setattr(diffusers, "__version__", "0.36.0")
        message = "diffusers 0.36.0 is not one of the releases tested, 0.37.0"
    else:
        monkeypatch.delattr(REGISTRY, "_constraints")
        message = "its registry lacks _constraints"
    for function in (integration.register, integration.enable):
        with pytest.raises(UnsupportedError, match=message):
            function()
    assert not sdpa.is_enabled()


def test_installed_release_is_tested() -> None:
    assert diffusers.__version__ in integration.TESTED


def test_disable_leaves_a_switch_that_was_on() -> None:
    sdpa.enable()
    integration.enable()
    integration.disable()
    assert sdpa.is_enabled()
    sdpa.disable()
