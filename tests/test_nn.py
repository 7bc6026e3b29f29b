"""The modules against attention written out by hand with the same weights, and against torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from flashtile import InvalidInputError
from flashtile.call.rotary import row_positions
from flashtile.nn import MultiheadAttention, RotaryEmbedding, TransformerBlock, apply_rotary
from tests.compat.by_hand import spun

DOUBLE = {"dtype": torch.float64}


def assert_close(actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> None:
    """Equal up to float64 rounding over sums of some hundred terms."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def turned(x: Tensor, positions: Tensor, dim: int, base: float, interleaved: bool) -> Tensor:
    """Rotary by complex numbers: ``(batch, seqlen, heads, head_dim)``, positions ``(batch, seqlen)``."""
    return spun(x, positions.double()[..., None] * base ** (-torch.arange(0, dim, 2).double() / dim), interleaved)


def by_hand(
    module: MultiheadAttention,
    x: Tensor,
    context: Tensor | None = None,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The module's formula, every score in memory; ``keep`` holds all masks together."""
    source = x if context is None else context
    q = module.q_proj(x).view(*x.shape[:2], module.num_heads, module.head_dim)
    k, v = (
        projection(source).view(*source.shape[:2], module.num_kv_heads, module.head_dim)
        for projection in (module.k_proj, module.v_proj)
    )
    if module.rotary is not None:
        settings = (module.rotary.dim, module.rotary.base, module.rotary.interleaved)
        counted = torch.arange(max(q.shape[1], k.shape[1])).expand(x.shape[0], -1)
        where_q, where_k = (counted[:, : t.shape[1]] if positions is None else positions for t in (q, k))
        q, k = turned(q, where_q, *settings), turned(k, where_k, *settings)
    k, v = (t.repeat_interleave(module.num_heads // module.num_kv_heads, dim=2) for t in (k, v))
    scale = module.head_dim**-0.5 if module.softmax_scale is None else module.softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if module.softcap:
        scores = module.softcap * torch.tanh(scores / module.softcap)
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v)
    return module.out_proj(out.flatten(2))


def band(seqlen: int, left: int, right: int) -> Tensor:
    distance = torch.arange(seqlen) - torch.arange(seqlen)[:, None]
    return (distance >= -left) & (distance <= right)


def assert_same_with_gradients(module: nn.Module, out: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    assert_close(out, expected)
    leaves = (*inputs, *module.parameters())
    dout = torch.randn_like(out)
    assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))


FAR = 10**6
MODULES: dict[str, tuple[dict, Tensor | None]] = {
    "plain": ({}, None),
    "no bias": ({"bias": False}, None),
    "no output bias": ({"out_bias": False}, None),
    "head_dim": ({"head_dim": 11}, None),
    "grouped": ({"num_kv_heads": 2}, None),
    "one kv head": ({"num_kv_heads": 1, "causal": True}, band(13, FAR, 0)),
    "causal": ({"causal": True}, band(13, FAR, 0)),
    "window": ({"window_size": (3, 2)}, band(13, 3, 2)),
    "causal window": ({"window_size": (4, None), "causal": True, "num_kv_heads": 2}, band(13, 4, 0)),
    "softcap and scale": ({"softcap": 0.7, "softmax_scale": 0.9}, None),
    "rotary": ({"rotary": True, "causal": True}, band(13, FAR, 0)),
    "partial rotary": ({"rotary": RotaryEmbedding(6, base=500.0, interleaved=True)}, None),
}


@pytest.mark.parametrize("name", MODULES)
def test_self_attention(name: str) -> None:
    settings, keep = MODULES[name]
    module = MultiheadAttention(32, 4, **settings, **DOUBLE)
    x = randn(2, 13, 32)
    assert_same_with_gradients(module, module(x), by_hand(module, x, keep=keep), x)


def test_cross_attention_with_mask_and_bias() -> None:
    module = MultiheadAttention(32, 4, num_kv_heads=2, context_dim=20, rotary=True, **DOUBLE)
    x, context, bias = randn(2, 5, 32), randn(2, 9, 20), randn(1, 4, 5, 9)
    valid = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])[:, None, None, :]
    out = module(x, context, attn_mask=valid, attn_bias=bias)
    assert_same_with_gradients(module, out, by_hand(module, x, context, valid, bias), x, context, bias)
    noisy = context.detach().clone()
    noisy[1, 4:] = 1e6
    assert_close(module(x, noisy, attn_mask=valid, attn_bias=bias), out)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_with_the_same_weights(causal: bool) -> None:
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, **DOUBLE)
    ours = MultiheadAttention(32, 4, causal=causal, **DOUBLE)
    with torch.no_grad():
        theirs.in_proj_bias.uniform_(-1, 1)
        for part, projection in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
            projection.weight.copy_(theirs.in_proj_weight.chunk(3)[part])
            projection.bias.copy_(theirs.in_proj_bias.chunk(3)[part])
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x = randn(3, 10, 32)
    hidden = ~band(10, FAR, 0) if causal else None
    expected = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    out = ours(x)
    assert_close(out, expected)
    dout = torch.randn_like(out)
    assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout))


LENGTHS = (6, 1, 0, 9)
BOUNDS = (0, *itertools.accumulate(LENGTHS))
CU = torch.tensor(BOUNDS, dtype=torch.int32)


@pytest.mark.parametrize("max_seqlen", [None, 9])
def test_packed_equals_each_sequence_alone(max_seqlen: int | None) -> None:
    module = MultiheadAttention(32, 4, num_kv_heads=2, causal=True, window_size=(5, 0), rotary=True, **DOUBLE)
    x = randn(16, 32)
    expected = torch.cat([module(x[None, start:stop])[0] for start, stop in itertools.pairwise(BOUNDS)])
    out = module(x, cu_seqlens=CU, max_seqlen=max_seqlen)
    assert_same_with_gradients(module, out, expected, x)


def test_packed_cross_attention_equals_each_pair_alone() -> None:
    module = MultiheadAttention(32, 4, context_dim=8, rotary=True, **DOUBLE)
    x, context = randn(16, 32), randn(11, 8)
    bounds = (0, 3, 5, 5, 11)
    cu = torch.tensor(bounds, dtype=torch.int32)
    pairs = zip(itertools.pairwise(BOUNDS), itertools.pairwise(bounds), strict=True)
    expected = torch.cat([module(x[None, a:b], context[None, c:d])[0] for (a, b), (c, d) in pairs])
    out = module(x, context, cu_seqlens=CU, cu_seqlens_context=cu, max_seqlen_context=6)
    assert_same_with_gradients(module, out, expected, x, context)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_distance_alone(interleaved: bool) -> None:
    rotary = RotaryEmbedding(12, base=100.0, interleaved=interleaved)
    q, k = randn(2, 9, 3, 16), randn(2, 9, 3, 16)

    def scores(shift_q: int, shift_k: int) -> Tensor:
        return torch.einsum("bihd,bjhd->bhij", rotary(q, shift_q), rotary(k, shift_k))

    assert_close(scores(0, 0), scores(1234, 1234))
    assert (scores(0, 0) - scores(0, 1)).abs().max() > 0.1
    where = torch.arange(9).expand(2, 9)
    assert_close(rotary(q), turned(q, where, 12, 100.0, interleaved))
    assert_close(rotary(q).norm(dim=-1), q.norm(dim=-1))


def test_positions_shift_reorder_and_count_in_each_sequence() -> None:
    module = MultiheadAttention(32, 4, rotary=True, **DOUBLE)
    x = randn(2, 8, 32)
    out = module(x)
    assert_close(module(x, positions=77), out)
    assert_close(module(x, positions=torch.arange(8) + 5), out)
    apart = torch.stack([torch.arange(8), 3 * torch.arange(8)])
    assert_close(module(x, positions=apart), by_hand(module, x, positions=apart))
    order = torch.randperm(8)
    assert_close(module(x[:, order], positions=order), out[:, order])
    packed = module(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 8, 16], dtype=torch.int32), positions=apart.flatten())
    assert_close(packed.view_as(x), module(x, positions=apart))


def test_the_last_rows_of_a_longer_sequence() -> None:
    """Decoding: the new rows attend to the whole sequence, aligned to its end."""
    module = MultiheadAttention(32, 4, causal=True, window_size=(6, 0), rotary=True, **DOUBLE)
    x = randn(2, 12, 32)
    assert_close(module(x[:, 9:], x, positions=9, context_positions=0), module(x)[:, 9:])


def test_rotary_follows_the_input_not_a_cast_of_the_model() -> None:
    rotary = RotaryEmbedding(8)
    x = torch.randn(1, 4, 2, 8)
    expected = rotary(x, 10000)
    assert torch.equal(rotary.to(torch.bfloat16)(x, 10000), expected)
    assert not rotary.state_dict()
    half = rotary(x.to(torch.bfloat16), 10000)
    assert half.dtype == torch.bfloat16
    exact = turned(x.to(torch.bfloat16).double(), torch.arange(10000, 10004)[None], 8, 10000.0, False)
    # The float32 angle at position 10^4 is off by up to 2^-24 * 10^4; the result is rounded to 8 bits once.
    torch.testing.assert_close(half.double(), exact, rtol=2**-8, atol=4 * 1e4 * 2**-24)


def test_apply_rotary_takes_tables() -> None:
    rotary = RotaryEmbedding(8)
    x = randn(2, 5, 3, 8)
    cos, sin = rotary.angles(torch.arange(5), torch.float64)
    assert_close(apply_rotary(x, cos, sin), rotary(x))
    torch.autograd.gradcheck(lambda t: apply_rotary(t, cos, sin, interleaved=True), (x,))


def test_row_positions() -> None:
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert row_positions(3, 4).tolist() == [4, 5, 6]
    assert row_positions(2, torch.tensor([0, 7])).tolist() == [[0, 1], [7, 8]]
    assert row_positions(7, 0, cu).tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert row_positions(6, torch.tensor([10, 20, 30]), cu).tolist() == [10, 11, 30, 31, 32, 0]


def test_dropout_acts_in_training_only_and_repeats_with_its_seed() -> None:
    seqlen, dropout = 32, 0.3
    module = MultiheadAttention(seqlen, 1, bias=False, dropout=dropout, **DOUBLE)
    with torch.no_grad():
        module.q_proj.weight.zero_()  # equal scores, and values that show the probabilities
        nn.init.eye_(module.v_proj.weight)
        nn.init.eye_(module.out_proj.weight)
    x = torch.eye(seqlen, dtype=torch.float64).expand(64, seqlen, seqlen)
    torch.manual_seed(11)
    probs = module(x)
    kept = probs[probs != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / seqlen / (1 - dropout)))
    spread = (dropout * (1 - dropout) / probs.numel()) ** 0.5
    assert abs(1 - kept.numel() / probs.numel() - dropout) < 5 * spread
    torch.manual_seed(11)
    assert torch.equal(module(x), probs)
    assert not torch.equal(module(x), probs)
    module.eval()
    assert_close(module(x), torch.full_like(probs, 1 / seqlen))


def test_names_and_initial_scale() -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(256, 8, num_kv_heads=2, rotary=True)
    state = module.state_dict()
    names = [f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    assert list(state) == names
    assert state["k_proj.weight"].shape == (64, 256)
    for name, value in state.items():
        if name.endswith("bias"):
            assert torch.equal(value, torch.zeros_like(value))
        else:  # the variance of n uniform draws is off by about sqrt(0.8 / n), here under 0.8%
            assert abs(value.var().item() * 256 - 1) < 0.04
    other = MultiheadAttention(256, 8, num_kv_heads=2)
    other.load_state_dict(state)
    shown = repr(MultiheadAttention(64, 4, num_kv_heads=2, causal=True, window_size=(7, 0), dropout=0.1))
    assert "embed_dim=64, num_heads=4, num_kv_heads=2, causal=True, window_size=(7, 0), dropout=0.1" in shown


def test_autocast_and_low_precision() -> None:
    module = MultiheadAttention(32, 4, rotary=True)
    x = torch.randn(2, 9, 32)
    exact = module.double()(x.double())
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    # Four roundings to 8 bits of numbers of this size, one behind the other.
    assert (out - exact).abs().max() <= 4 * 2**-8 * exact.abs().max()


def test_transformer_block() -> None:
    block = TransformerBlock(MultiheadAttention(32, 4, causal=True, rotary=True, **DOUBLE), mlp_dim=48, dropout=0.5)
    block.eval()
    x = randn(16, 32)
    attended = x + block.attn(block.attn_norm(x), cu_seqlens=CU)
    hidden = nn.functional.gelu(block.mlp[0](block.mlp_norm(attended)))
    assert hidden.shape == (16, 48)
    expected = attended + block.mlp[2](hidden)
    assert_same_with_gradients(block, block(x, cu_seqlens=CU, max_seqlen=9), expected, x)
    assert not torch.equal(block.train()(x, cu_seqlens=CU), expected)


def test_compiles_to_one_graph_for_every_length() -> None:
    torch._dynamo.reset()
    module = MultiheadAttention(32, 4, num_kv_heads=2, causal=True, rotary=True, **DOUBLE)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for seqlen in (9, 14):  # the second length makes PyTorch compile once more, for all lengths
        x = randn(2, seqlen, 32)
        assert_same_with_gradients(module, compiled(x), module(x), x)
    with torch.compiler.set_stance("fail_on_recompile"):
        x = randn(2, 31, 32)
        assert_same_with_gradients(module, compiled(x), module(x), x)


X = torch.zeros(2, 5, 32)
BAD_CALLS = {
    "num_heads": lambda: MultiheadAttention(32, 5),
    "num_kv_heads": lambda: MultiheadAttention(32, 4, num_kv_heads=3),
    "embed_dim": lambda: MultiheadAttention(0, 4),
    "head_dim": lambda: MultiheadAttention(32, 4, head_dim=0),
    "dropout 1": lambda: MultiheadAttention(32, 4, dropout=1.0),
    "rotary": lambda: MultiheadAttention(32, 4, rotary=RotaryEmbedding(16)),
    "rotary of odd head_dim": lambda: MultiheadAttention(28, 4, rotary=True),
    "rotary a word": lambda: MultiheadAttention(32, 4, rotary="yes"),
    "causal": lambda: MultiheadAttention(32, 4, causal=1),
    "window_size": lambda: MultiheadAttention(32, 4, window_size=(1, 2, 3)),
    "softmax_scale": lambda: MultiheadAttention(32, 4, softmax_scale=torch.tensor(1.0)),
    "softcap": lambda: MultiheadAttention(32, 4, softcap=-1.0),
    "deterministic": lambda: MultiheadAttention(32, 4, deterministic=None),
    "backend": lambda: MultiheadAttention(32, 4, backend="flash"),
    "embed_dim a float": lambda: MultiheadAttention(32.0, 4),
    "num_heads a text": lambda: MultiheadAttention(32, "4"),
    "num_kv_heads negative": lambda: MultiheadAttention(32, 4, num_kv_heads=-2),
    "context_dim": lambda: MultiheadAttention(32, 4, context_dim=0),
    "dropout a text": lambda: MultiheadAttention(32, 4, dropout="0.1"),
    "dim": lambda: RotaryEmbedding(7),
    "dim a float": lambda: RotaryEmbedding(8.0),
    "base": lambda: RotaryEmbedding(8, base=0.0),
    "base a text": lambda: RotaryEmbedding(8, base="1e4"),
    "attention": lambda: TransformerBlock(nn.MultiheadAttention(32, 4)),
    "mlp_dim": lambda: TransformerBlock(MultiheadAttention(32, 4), mlp_dim=0),
    "dropout": lambda: TransformerBlock(MultiheadAttention(32, 4), dropout=1.0),
    "bias": lambda: MultiheadAttention(32, 4, bias="no"),
    "x of integers": lambda: MultiheadAttention(32, 4)(X.long()),
    "x of two features": lambda: RotaryEmbedding(8)(torch.zeros(3, 8)),
    "x narrower than dim": lambda: RotaryEmbedding(16)(torch.zeros(3, 2, 8)),
    "x turned as integers": lambda: RotaryEmbedding(8)(torch.zeros(3, 2, 8, dtype=torch.int32)),
    "positions a list": lambda: RotaryEmbedding(8)(torch.zeros(3, 2, 8), [0, 1, 2]),
    "cu_seqlens a list": lambda: RotaryEmbedding(8)(torch.zeros(3, 2, 8), 0, [0, 3]),
    "cos": lambda: apply_rotary(torch.zeros(3, 2, 8), torch.zeros(2, 4), torch.zeros(2, 4)),
    "cos a list": lambda: apply_rotary(torch.zeros(3, 2, 8), [1.0], [1.0]),
    "cu_seqlens past x": lambda: MultiheadAttention(32, 4)(X[0], cu_seqlens=CU),
    "cu_seqlens of int64": lambda: MultiheadAttention(32, 4)(X[0], cu_seqlens=CU[:2].long()),
    "max_seqlen": lambda: MultiheadAttention(32, 4)(X[0], cu_seqlens=CU[:1] + torch.tensor([0, 5]).int(), max_seqlen=4),
    "max_seqlen of dense rows": lambda: MultiheadAttention(32, 4)(X, max_seqlen=5),
    "context of another batch": lambda: MultiheadAttention(32, 4)(X, X[:1]),
    "context left out": lambda: MultiheadAttention(32, 4, context_dim=8)(X),
    "attention to a context": lambda: TransformerBlock(MultiheadAttention(32, 4, context_dim=8)),
    "x a list in a block": lambda: TransformerBlock(MultiheadAttention(32, 4))([X]),
    "x a list": lambda: MultiheadAttention(16, 4)([X]),
    "context a list": lambda: MultiheadAttention(32, 4)(X, [X]),
    "x": lambda: MultiheadAttention(16, 4)(X),
    "cu_seqlens": lambda: MultiheadAttention(32, 4)(X[0]),
    "context": lambda: MultiheadAttention(32, 4, context_dim=8)(X, X),
    "context_positions": lambda: MultiheadAttention(32, 4)(X, context_positions=3),
    "cu_seqlens_context": lambda: MultiheadAttention(32, 4)(X, X, cu_seqlens_context=CU),
    "positions": lambda: MultiheadAttention(32, 4, rotary=True)(X, positions=torch.arange(4)),
    "attn_mask": lambda: MultiheadAttention(32, 4)(X, attn_mask=torch.ones(2, 4, 5, 6, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_name_their_argument(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name.split()[0]}: "):
        BAD_CALLS[name]()


def test_errors_speak_of_the_modules_own_arguments() -> None:
    module = MultiheadAttention(32, 4)
    with pytest.raises(InvalidInputError, match=r"^cu_seqlens: ends with 16, but x has 5 rows$"):
        module(X[0], cu_seqlens=CU)
    with pytest.raises(InvalidInputError, match=r"^context: batch is 1, but x has 2$"):
        module(X, X[:1])


@pytest.mark.parametrize(("batch_first", "bias", "kdim"), [(True, True, None), (False, True, None), (False, False, 20)])
def test_from_torch_computes_what_torchs_module_does(batch_first: bool, bias: bool, kdim: int | None) -> None:
    theirs = nn.MultiheadAttention(32, 4, bias=bias, kdim=kdim, vdim=kdim, batch_first=batch_first, **DOUBLE)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.3, 0.3)
    ours = MultiheadAttention.from_torch(theirs.eval())
    assert ours.batch_first is batch_first and not ours.training
    x, key, value = randn(2, 5, 32), randn(2, 7, kdim or 32), randn(2, 7, kdim or 32)
    given = (x, key, value) if batch_first else tuple(each.transpose(0, 1) for each in (x, key, value))
    hidden = torch.arange(7) >= torch.tensor([[4], [7]])
    (out, none), expected = ours(*given, key_padding_mask=hidden), theirs(*given, key_padding_mask=hidden)[0]
    assert none is None
    assert_close(out, expected)
    dout = torch.randn_like(out)
    grads = (torch.autograd.grad(each, (x, key, value), dout) for each in (out, expected))
    assert_close(*grads)


def test_one_tensor_three_times_is_self_attention() -> None:
    module, x = MultiheadAttention(32, 4, rotary=True, causal=True, **DOUBLE), randn(2, 6, 32)
    assert_close(module(x, x, x, positions=9)[0], module(x, positions=9))


LAYERS = {
    "encoder": (nn.TransformerEncoderLayer, ["self_attn"]),
    "decoder": (nn.TransformerDecoderLayer, ["self_attn", "multihead_attn"]),
}
_SEQ, _SEQ_K = 6, 5
_BLOCKED = torch.ones(_SEQ, _SEQ, dtype=torch.bool).triu(2)
_EACH = torch.arange(2 * 4 * _SEQ * _SEQ).view(8, _SEQ, _SEQ) % 5 == 1
_HIDDEN = torch.arange(_SEQ) >= torch.tensor([[4], [6]])
_CAUSAL = nn.Transformer.generate_square_subsequent_mask(_SEQ, dtype=torch.float64)
# As a decoder's layer calls them; an encoder's are src_mask, src_key_padding_mask and is_causal.
GIVEN: dict[str, dict] = {
    "plain": {},
    "mask": {"mask": _BLOCKED},
    "mask of heads": {"mask": _EACH},
    "mask and padding": {"mask": _EACH, "key_padding_mask": _HIDDEN},
    "added": {"mask": torch.linspace(-2, 2, 8 * _SEQ * _SEQ, dtype=torch.float64).sin().view(8, _SEQ, _SEQ)},
    "causal": {"mask": _CAUSAL, "is_causal": True},
    "causal and padding": {"mask": _CAUSAL < 0, "is_causal": True, "key_padding_mask": _HIDDEN},
    "padding": {"key_padding_mask": _HIDDEN},
}


def layers(kind: str, batch_first: bool, norm_first: bool) -> tuple[nn.Module, nn.Module]:
    """torch's layer, and one with our attention and the same weights; nothing is dropped."""
    make, names = LAYERS[kind]
    theirs = make(32, 4, 48, 0.0, batch_first=batch_first, norm_first=norm_first, **DOUBLE)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    ours = copy.deepcopy(theirs)
    for name in names:
        setattr(ours, name, MultiheadAttention.from_torch(getattr(ours, name)))
    return theirs, ours


def layer_call(kind: str, batch_first: bool, given: dict) -> tuple[tuple[Tensor, ...], dict]:
    """Inputs of a layer, and masks by the names that it has for them."""
    inputs = randn(2, _SEQ, 32), randn(2, _SEQ_K, 32)
    inputs = inputs if batch_first else tuple(x.transpose(0, 1) for x in inputs)
    if kind == "encoder":
        return inputs[:1], {name if name == "is_causal" else f"src_{name}": x for name, x in given.items()}
    memory = {"memory_mask": _EACH[:, :, :_SEQ_K], "memory_key_padding_mask": _HIDDEN[:, :_SEQ_K]}
    return inputs, {**memory, **{f"tgt_{name}": x for name, x in given.items()}}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("kind", LAYERS)
def test_torchs_layers_take_it(kind: str, name: str) -> None:
    """In training mode and in inference, where torch's own layer is fused."""
    batch_first = name not in ("mask", "added")
    theirs, ours = layers(kind, batch_first, norm_first=name == "mask of heads")
    given, masks = layer_call(kind, batch_first, GIVEN[name])
    out, expected = ours(*given, **masks), theirs(*given, **masks)
    assert_close(out, expected)
    dout, (*_, name_of_last) = torch.randn_like(out), LAYERS[kind][1]
    of_ours, of_theirs = (getattr(each, name_of_last) for each in (ours, theirs))
    *grads, dvalue = torch.autograd.grad(out, (*given, of_ours.v_proj.weight), dout)
    *wanted, dwhole = torch.autograd.grad(expected, (*given, of_theirs.in_proj_weight), dout)
    assert_close((*grads, dvalue), (*wanted, dwhole[64:]))
    with torch.no_grad():
        assert_close(ours.eval()(*given, **masks), theirs.eval()(*given, **masks))


@pytest.mark.parametrize("swapped_first", [True, False])
def test_torchs_encoder_and_decoder_take_it(swapped_first: bool) -> None:
    """The encoder would make nested tensors of padded ones for its fused inference."""
    (theirs, ours), hidden = layers("encoder", True, False), _HIDDEN
    encoders = [nn.TransformerEncoder(each, 2) for each in (theirs, theirs)]
    if swapped_first:
        with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
            encoders[1] = nn.TransformerEncoder(ours, 2)
    else:
        for layer in encoders[1].layers:
            layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    x = randn(2, _SEQ, 32)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            expected, out = (each.eval()(x, src_key_padding_mask=hidden) for each in encoders)
        assert_close(out[~hidden], expected[~hidden])
    (theirs, ours), mask = layers("decoder", True, False), {"tgt_mask": _CAUSAL, "tgt_is_causal": True}
    assert_close(*(nn.TransformerDecoder(each, 2)(x, x, **mask) for each in (theirs, ours)))


def test_a_compiled_layer_is_one_graph() -> None:
    torch._dynamo.reset()
    _, ours = layers("encoder", True, False)
    (x,), masks = layer_call("encoder", True, GIVEN["mask and padding"])
    for mode in (True, False):
        run = torch.compile(ours.train(mode), fullgraph=True, backend="eager")
        assert_close(run(x, **masks), ours(x, **masks))


def test_a_call_with_query_key_and_value_is_torchs() -> None:
    """Its result is a pair whatever the batch, compiled too; its masks hide."""
    module, x = MultiheadAttention(32, 4, **DOUBLE), randn(2, 2, 32)
    keep = torch.tensor([[True, False], [True, True]])
    torch._dynamo.reset()
    for run in (module, torch.compile(module, fullgraph=True, backend="eager")):
        out, none = run(x, x, x, attn_mask=~keep, need_weights=False)
        assert none is None and out.shape == x.shape
        assert_close(out, module(x, attn_mask=keep))
    bias = randn(2, 2)
    assert_close(module(x, x, x, attn_mask=bias.detach(), attn_bias=bias)[0], module(x, attn_bias=2 * bias))
    _, largest = module(x, x, x, return_max_scores=True)
    assert_close(largest, module(x, return_max_scores=True)[1])


def test_a_hint_of_causality_takes_the_masks_place() -> None:
    module, x = MultiheadAttention(32, 4, **DOUBLE), randn(2, 6, 32)
    wrong = torch.ones(6, 6, dtype=torch.bool).tril(-1)  # the hint is believed
    out, _ = module(x, x, x, attn_mask=wrong, is_causal=True)
    assert_close(out, module(x, attn_mask=~_CAUSAL.bool()))
    context = randn(2, 4, 32)
    mask = torch.ones(6, 4, dtype=torch.bool).triu(1)  # from the top left, which causal is not where lengths differ
    assert_close(module(x, context, context, attn_mask=mask, is_causal=True)[0], module(x, context, attn_mask=~mask))


BAD_TORCH_CALLS = {
    "need_weights": {"need_weights": True},
    "need_weights a number": {"need_weights": 0},
    "is_causal": {"is_causal": True},
    "attn_mask of one head too many": {"attn_mask": torch.zeros(9, 5, 5, dtype=torch.bool)},
    "attn_mask of integers": {"attn_mask": torch.zeros(5, 5, dtype=torch.int32)},
    "attn_mask of another length": {"attn_mask": torch.zeros(8, 5, 6, dtype=torch.bool)},
    "attn_mask of floats": {"attn_mask": torch.zeros(8, 5, 6)},
    "attn_mask a list": {"attn_mask": [True]},
    "key_padding_mask of integers": {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", BAD_TORCH_CALLS)
def test_bad_calls_of_torchs_form_name_their_argument(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name.split()[0]}: "):
        MultiheadAttention(32, 4)(X, X, X, **BAD_TORCH_CALLS[name])


def test_masks_of_torchs_layout_are_refused_with_their_cure_elsewhere() -> None:
    module, x = MultiheadAttention(32, 4), X
    mask, hidden = torch.ones(8, 5, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    for others in ({}, {"key_padding_mask": hidden}):
        with pytest.raises(InvalidInputError, match=r"^attn_mask: .*give attn_mask\.view\(2, 4, 5, 5\), where True"):
            module(x, attn_mask=mask, **others)
    with pytest.raises(InvalidInputError, match="^attn_mask: does not go with key_padding_mask: "):
        module(x, attn_mask=mask[..., :4], key_padding_mask=hidden)


def test_a_key_padding_mask_goes_with_a_mask() -> None:
    module, x = MultiheadAttention(32, 4, **DOUBLE), randn(2, 6, 32)
    hidden, keep = torch.arange(6) >= torch.tensor([[4], [6]]), band(6, 3, 2)
    out = module(x, attn_mask=keep, key_padding_mask=hidden)
    assert_close(out, module(x, attn_mask=keep & ~hidden[:, None, None, :]))
    added = torch.zeros(2, 6, **DOUBLE).masked_fill(hidden, -torch.inf)
    assert_close(module(x, attn_mask=keep, key_padding_mask=added), out)
    for name, mask in (("shape", hidden[:, :3]), ("dtype", hidden.int())):
        with pytest.raises(InvalidInputError, match=f"^key_padding_mask: .*{name}"):
            module(x, key_padding_mask=mask)


def test_from_torch_refuses_what_it_cannot_copy() -> None:
    for module in (
        nn.Linear(2, 2),
        nn.MultiheadAttention(8, 2, add_zero_attn=True),
        nn.MultiheadAttention(8, 2, kdim=4),
    ):
        with pytest.raises(InvalidInputError, match="^module: "):
            MultiheadAttention.from_torch(module)
