"""Faults that are planted in models, and models without any."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile
from flashtile.audits import Audit, measure
from flashtile.audits.calls import SeenCall
from flashtile.integrations import sdpa
from tests.audits.models import WAYS, Attention, Decoder, Plan, left_padded, tokens

LAST = "layers.1"


def kinds(found: Audit, layer: str | None = None) -> set[str]:
    return {each.kind for each in found.findings if layer is None or each.layer == layer}


def text(found: Audit, kind: str, layer: str = LAST) -> str:
    (only,) = (each.text for each in found.findings if (each.layer, each.kind) == (layer, kind))
    return only


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_found_where_nothing_is_wrong(way: str, window: int | None, dtype: torch.dtype) -> None:
    model = Decoder(Plan(way, window)).to(dtype)
    found = flashtile.audit(model, tokens())
    assert found.findings == () and found.notes == ()
    words = "causal" if window is None else f"causal, window of {window} keys"
    assert [(call.layer, call.mask) for call in found.calls] == [("layers.0", words), (LAST, words)]
    scales = [call.scale for call in found.calls]
    assert scales == pytest.approx([0.25, 0.25], rel=0.01)
    assert all(call.errors is not None and call.errors.plain > 0 for call in found.calls)
    assert found.moved is not None and found.moved <= (0.1 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("way", ["sdpa", "written", "einsum"])
def test_nothing_is_found_with_padding(way: str) -> None:
    found = flashtile.audit(Decoder(Plan(way, 6)), left_padded())
    assert found.findings == ()
    # Rows of padding see nothing, and are nobody's.
    assert [call.kept.empty if call.kept else None for call in found.calls] == [(0, 35), (0, 35)]


FAULTS: dict[str, tuple[Callable[[str], Plan], tuple[str, ...], str]] = {
    "mask": (lambda way: Plan(way, later=1), WAYS, "rows see 1 key after their own: the causal mask is one row off"),
    "window": (lambda way: Plan(way, 6, wider=1), WAYS, "rows see 7 keys up to their own, the module says 6: off by"),
    "scale": (lambda way: Plan(way, scale=1 / 16), WAYS, "scaled by 0.0625 where 0.25 was expected (1 / head_dim)"),
    "heads": (lambda way: Plan(way, interleaved=True), WAYS[:3], "reads key head h % 2, where grouped heads read h //"),
    "dropout": (lambda way: Plan(way, dropout=True), WAYS, "dropout of 0.1 in a model or layer that is in eval mode"),
    "padding": (lambda way: Plan(way, sees_padding=True), WAYS[:3], "15 of 15 rows of real tokens see keys of padding"),
}


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, (_, ways, _) in FAULTS.items() for way in ways])
def test_planted_faults_are_named(kind: str, way: str) -> None:
    plan, _, words = FAULTS[kind]
    found = flashtile.audit(Decoder(plan(way)), left_padded() if kind == "padding" else tokens())
    # The layer, and for two kinds the model as a whole, which probes show.
    assert kinds(found, LAST) == {kind} and kinds(found, "layers.0") == set()
    assert words in text(found, kind)
    # Written out, rows of padding see later tokens, and real rows see rows of padding.
    assert kinds(found, "") <= {kind} or (kind, way) in (("padding", "written"), ("padding", "einsum"))
    assert ("" in {each.layer for each in found.findings}) == (kind in ("mask", "padding"))


@pytest.mark.parametrize(("plan", "kind", "words"), [
    (Plan(later=-1), "mask", "no row sees its own token: the mask is one row off"),
    (Plan(later=19), "mask", "not causal: rows see up to 19 keys after their own"),
    (Plan(window=6, wider=-1), "window", "rows see at most 5 keys up to their own, the module says 6: off by one"),
    (Plan(scale=1.0), "scale", "(not at all)"),
])  # fmt: skip
def test_other_faults_are_named(plan: Plan, kind: str, words: str) -> None:
    assert words in text(flashtile.audit(Decoder(plan), tokens()), kind)


def test_a_mask_that_is_off_needs_no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Attention, "is_causal")
    assert kinds(flashtile.audit(Decoder(Plan(later=1)), tokens())) == {"mask"}
    assert kinds(flashtile.audit(Decoder(Plan(later=19)), tokens())) == set()
    assert kinds(flashtile.audit(Decoder(Plan(later=19)), tokens(), causal=True)) == {"mask"}


def test_what_is_stated_counts() -> None:
    model = Decoder(Plan(window=6, wider=1, scale=1 / 16))
    found = flashtile.audit(model, tokens(), window_size=(6, 0), softmax_scale=1 / 16)
    assert {each.layer for each in found.findings} == {"layers.0"} and kinds(found) == {"window", "scale"}


def test_padding_is_found_by_its_id() -> None:
    model, given = Decoder(Plan()), left_padded()
    model.config = types.SimpleNamespace(pad_token_id=0)  # type: ignore[assignment]
    assert kinds(flashtile.audit(model, given["tokens"])) == {"padding"}
    assert kinds(flashtile.audit(model, given)) == set()


@pytest.mark.parametrize("plan", [
    Plan(window=6), Plan("written", later=1), Plan(window=6, wider=-1), Plan(later=-1), Plan(later=19),
])  # fmt: skip
def test_rows_a_few_at_a_time_show_the_same(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = Decoder(plan), left_padded()
    whole = flashtile.audit(model, given)
    monkeypatch.setattr(measure, "_BYTES", 3 * 8 * 2 * 4 * 20)
    parts = flashtile.audit(model, given)
    assert whole.findings == parts.findings
    for one, other in zip(whole.calls, parts.calls, strict=True):
        assert one.kept == other.kept and one.mask == other.mask
        assert one.errors is not None and other.errors is not None
        assert one.errors.error == pytest.approx(other.errors.error, rel=0.01)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_found_under_autocast(way: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = flashtile.audit(Decoder(Plan(way)), tokens())
    assert found.findings == ()
    assert all(call.errors is not None and call.errors.plain > 1e-5 for call in found.calls)


# Kernels that are wrong, under flash-attn's name.
def _one_short(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    left, right = options.pop("window_size")
    return flashtile.attention(q, k, v, window_size=(left - 1, right), **options)


def _wrong_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return flashtile.attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), **options)


def _wrong_tail(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = flashtile.attention(q, k, v, **options)
    return torch.cat([out[:, :16], out[:, 16:] * 1.5], dim=1)


@pytest.mark.parametrize(("kernel", "kind", "words"), [
    (_one_short, "window", "in which rows see one key fewer before their own"),
    (_wrong_heads, "heads", "in which query head h reads key head h % 2"),
    (_wrong_tail, "error", "4 rows of 20 (16 to 19), 4 of 4 heads"),
])  # fmt: skip
def test_wrong_kernels_are_named(
    kernel: Callable[..., Tensor], kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("a_kernel")

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        return kernel(q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, window_size=window_size)

    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_kernel", package)
    monkeypatch.setattr("tests.audits.models.flash_attn_2", package)
    found = flashtile.audit(Decoder(Plan("flash", 6)), tokens())
    assert kinds(found) == {kind} and words in text(found, kind)
    assert found.moved is not None and found.moved > 0
    call = found.calls[1]
    assert call.errors is not None and call.errors.error > 100 * call.errors.plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_late_rows_are_judged_by_their_own_size(dtype: torch.dtype) -> None:
    """Averages of many keys are small: a twentieth of them is less than what the first rows may err by."""
    q, k, v = (x.transpose(1, 2) for x in _heads(512, dtype, 64))
    out = flashtile.attention(q, 0.1 * k, v, causal=True)
    call = SeenCall("flashtile.attention", q, 0.1 * k, v, out, torch.arange(512)[None], 64**-0.5, right=0)
    errors, exact = measure.errors_of(call)
    assert not errors.is_fault()
    out[:, -3:] *= 1.05
    errors, _ = measure.errors_of(call)
    assert errors.wrong == (3, 509, 511) and errors.heads == (0, 1)
    if dtype == torch.bfloat16:
        assert errors.error < 2 * torch.finfo(dtype).eps * float(exact.abs().max())


class Alone(nn.Module):
    """One call."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.run(*tensors)


def _heads(rows: int = 12, dtype: torch.dtype = torch.float32, dim: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return tuple(torch.randn(1, 2, rows, dim, dtype=dtype) for _ in range(3))


def test_rows_without_keys_and_idle_masks() -> None:
    keep = torch.ones(12, 12, dtype=torch.bool)
    model = Alone(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keep))
    found = flashtile.audit(model, _heads())
    assert found.findings == () and "cuts nothing" in found.notes[0]
    keep[3:5] = False
    found = flashtile.audit(model, _heads())
    assert [str(each) for each in found.findings] == ["the model: empty rows: 2 of 12 rows see no key"]
    assert found.notes == ()


def test_is_causal_with_fewer_rows_than_keys() -> None:
    q, k, v = _heads()
    found = flashtile.audit(Alone(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)), (q[:, :, :2], k, v))
    assert "is_causal counts 2 rows from the first of 12 keys: the last row sees 2" in found.findings[0].text


def test_scores_that_overflow() -> None:
    q, k, v = _heads(dtype=torch.float16)
    model = Alone(lambda q, k, v: ((q @ k.mT) * 8**-0.5).softmax(-1) @ v)
    assert kinds(flashtile.audit(model, (q, k, v))) == set()
    found = flashtile.audit(model, (q * 300, k * 300, v))
    assert kinds(found) == {"overflow", "not finite"}
    assert "float16 ends at 6.55e+04" in found.findings[0].text


@pytest.mark.parametrize("name", ["captured", "capped", "listed", "intervals", "slopes", "sinks", "chunks"])
def test_options_of_ours_are_read(name: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in _heads(70))
    slopes = torch.tensor([0.5, 0.25])
    options: dict[str, Any] = {
        "captured": dict(
            score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01, mask_mod=lambda b, h, i, j: i >= j
        ),
        "capped": dict(softcap=0.5, causal=True),
        "listed": dict(
            block_mask=flashtile.create_block_mask(
                lambda b, h, i, j: (i >= j) & (j + 9 > i), None, None, 70, 70, device="cpu", BLOCK_SIZE=16
            )
        ),
        "intervals": dict(block_mask=flashtile.masks.documents(torch.arange(70) // 20), causal=True),
        "slopes": dict(alibi_slopes=slopes, causal=True),
        "sinks": dict(sinks=slopes),
        "chunks": dict(attention_chunk=16, causal=True),
    }[name]
    found = flashtile.audit(Alone(lambda *x: flashtile.attention(*x, **options)), (q, k, v))
    assert found.findings == () and found.calls[0].function == "flashtile.attention (cpu)"
    call = found.calls[0]
    assert call.errors is not None and 0 < call.errors.error < 1e-5


def test_packed_calls_are_read() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in _heads(40))
    bounds = torch.tensor([0, 13, 33], dtype=torch.int32)
    found = flashtile.audit(
        Alone(lambda *x: flashtile.attention_varlen(*x, bounds, bounds, causal=True, window_size=(4, 0))), (q, k, v)
    )
    # Rows past the last sequence see nothing.
    assert [(each.kind, each.value) for each in found.findings] == [("empty rows", 7)]
    assert found.calls[0].errors is not None and found.calls[0].errors.error < 1e-5


def test_sequences_of_one_length_are_no_window() -> None:
    q, k, v = _heads(40)
    document, i = torch.arange(40) // 10, torch.arange(40)
    keep = (document[:, None] == document) & (i[:, None] >= i)
    bounds = torch.arange(0, 41, 10, dtype=torch.int32)
    said: dict[str, Any] = dict(causal=True, window_size=(None, 0))
    masked = Alone(lambda *x: F.scaled_dot_product_attention(*x, keep))
    packed = Alone(
        lambda *x: flashtile.attention_varlen(*(y[0].transpose(0, 1) for y in x), bounds, bounds, causal=True)
    )
    for model in (masked, packed):
        found = flashtile.audit(model, (q, k, v), **said)
        assert found.findings == () and found.calls[0].mask.startswith("causal")
    keep &= i[:, None] - i < 4
    assert flashtile.audit(masked, (q, k, v), causal=True, window_size=(3, 0)).findings == ()
    assert kinds(flashtile.audit(masked, (q, k, v), causal=True, window_size=(2, 0))) == {"window"}


@pytest.mark.long
def test_flex_attention_is_read() -> None:
    from torch.nn.attention import flex_attention as flex

    mask = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 5), 1, 1, 70, 70, device="cpu", BLOCK_SIZE=16)
    model = Alone(lambda q, k, v: flex.flex_attention(q, k, v, lambda s, b, h, i, j: s * 0.5 + h, mask))
    found = flashtile.audit(model, _heads(70), causal=True, window_size=(4, 0))
    assert found.findings == () and found.calls[0].mask == "causal, window of 5 keys"
    assert kinds(flashtile.audit(model, _heads(70), causal=True, window_size=(5, 0))) == {"window"}


def test_torchs_own_module_is_seen() -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    for more in ({"need_weights": False}, {"need_weights": True}):
        given = dict.fromkeys(("query", "key", "value"), torch.randn(2, 9, 16)) | {"attn_mask": mask, **more}
        found = flashtile.audit(module, given)
        assert found.findings == () and [call.mask for call in found.calls] == ["causal"]


def test_who_served_the_call_is_said() -> None:
    model = Decoder(Plan())
    assert "flash_for_cpu" in flashtile.audit(model, tokens()).calls[0].function
    with sdpa.use():
        assert flashtile.audit(model, tokens()).calls[0].function == "flashtile.attention (cpu)"
    found = flashtile.audit(Decoder(Plan("flash")), tokens())
    assert found.calls[0].function == "flashtile.flash_attn_func (flashtile's cpu)"


@pytest.mark.long
def test_compiled_models_run_as_code() -> None:
    found = flashtile.audit(torch.compile(Decoder(Plan(later=1))), tokens())
    assert len(found.calls) == 2 and "mask" in kinds(found)


@pytest.fixture
def unchanged() -> Iterator[None]:
    names = [(F, "scaled_dot_product_attention"), (flashtile, "attention"), (flashtile.nn, "attention")]
    before = [getattr(place, name) for place, name in names]
    fast, state = torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state()
    yield
    assert [getattr(place, name) for place, name in names] == before
    assert torch.backends.mha.get_fastpath_enabled() == fast and torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("unchanged")
def test_nothing_is_left_behind() -> None:
    model, given = Decoder(Plan("flashtile", dropout=True)), tokens()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    flashtile.audit(model, given)
    with pytest.raises(ValueError, match="unpack"):
        flashtile.audit(model, given[:, :, None])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())


def test_unknown_calls_are_told() -> None:
    q, k, v = (x.transpose(1, 2) for x in _heads(dtype=torch.bfloat16, dim=16))
    found = flashtile.audit(Alone(lambda *x: flashtile.attention(*x, precision="fp8")), (q, k, v))
    assert found.calls[0].errors is None and found.notes == ("1 call was not compared: precision",)
    lengths = torch.tensor([7], dtype=torch.int32)
    found = flashtile.audit(Alone(lambda *x: flashtile.attention_with_kvcache(*x, cache_seqlens=lengths)), (q, k, v))
    assert found.findings == () and found.notes == ("1 call was not compared: a cache",)
    found = flashtile.audit(Alone(F.scaled_dot_product_attention), tuple(torch.ones(0, 2, 3, 8) for _ in range(3)))
    assert found.notes == ("1 call was not compared: nothing to compute",)
    assert "\nnothing compared\n" in str(found)
    found = flashtile.audit(nn.Linear(4, 4), torch.randn(2, 4))
    assert found.notes[0].startswith("no attention call was seen")
    assert "nothing found" not in str(found) and '"verdict bad">Nothing compared<' in found.html()


@pytest.mark.parametrize(("argument", "given"), [
    ("model", dict(model=len)), ("inputs", dict(inputs=3)), ("window_size", dict(window_size=(1,))),
    ("attention_mask", dict(attention_mask=torch.ones(3))),
])  # fmt: skip
def test_wrong_arguments_are_refused(argument: str, given: dict[str, Any]) -> None:
    with pytest.raises(flashtile.InvalidInputError) as error:
        flashtile.audit(**({"model": nn.Linear(4, 4), "inputs": torch.ones(1, 4)} | given))
    assert error.value.argument == argument


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href"}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_reports(tmp_path: Any) -> None:
    found = flashtile.audit(Decoder(Plan(later=1), layers=3), tokens())
    lines = str(found).splitlines()
    assert lines[0].startswith("Decoder: 3 attention calls, 3 compared with float64; ")
    assert lines[2].split()[:2] == ["layer", "attention"] and lines[3].startswith("layers.0 ... layers.1 (2) ")
    assert lines[6:] == ["2 findings", *(f"  {each}" for each in found.findings)]
    found.save(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    tags = _Tags()
    tags.feed(page)
    assert tags.open == [] and tags.seen.count("tr") == 4 and page.count('<tr class="bad">') == 1
    assert all(each.text in page for each in found.findings)


COMMAND = """
import torch
from tests.audits.models import Decoder, Plan, tokens

def good():
    return Decoder(Plan()), tokens()

def bad():
    return Decoder(Plan(later=1)), {"tokens": tokens()}

def neither():
    return 3

def blind():
    return torch.nn.Linear(4, 4), torch.ones(2, 4)

def needs(more):
    return more
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from flashtile.cli import main

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_models.py").write_text(COMMAND)
    try:
        assert main(["audit", "some_models.py:good"]) == 0
        assert capsys.readouterr().out == f"{flashtile.audit(Decoder(Plan()), tokens())}\n"
        assert main(["audit", "some_models:bad", "--html", "page.html"]) == 1
        assert "layers.1: mask: rows see 1 key" in capsys.readouterr().out
        assert "1 key after their own" in (tmp_path / "page.html").read_text()
        assert main(["audit", "some_models:good", "--window", "3", "0"]) == 1
        assert "rows see 20 keys up to their own, what is stated says 4" in capsys.readouterr().out
        assert main(["audit", "some_models:blind"]) == 1
        assert "nothing compared" in capsys.readouterr().out
        for place, words in (
            ("some_models:needs", "is called without arguments: missing a required argument: 'more'"),
            ("some_models:neither", "returned a int, must return (model, inputs)"),
            ("some_models:none", "some_models has no function none"),
            ("no_models:good", "there is no module no_models"),
            ("no_models.py:good", "there is no file no_models.py"),
            ("some_models", "must be such as model.py:make"),
        ):
            assert main(["audit", place]) == 2
            assert words in capsys.readouterr().err
    finally:
        sys.modules.pop("some_models", None)
