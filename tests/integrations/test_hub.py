"""The kernel repository that ``tools/hub.py`` writes, loaded as from the hub beside the installed flashtile."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf
from kernels._rust import Digest, DigestAlgorithm, Metadata
from torch.nn.attention import flex_attention
from transformers.integrations import hub_kernels

import flashtile
import kernels
from docs.blocks import ROOT
from flashtile.backends.gpu import ahead
from flashtile.backends.portable import kernels as portable
from flashtile.compat import flash_attn_2
from flashtile.integrations.transformers import enable
from tools import hub as tool

NAME = "ORG/flashtile"
# Decorators that Hugging Face's build refuses, unless a function of theirs makes the operator's name.
_REGISTERING = {
    "custom_op", "register_fake", "register_kernel", "register_torch_dispatch", "register_vmap", "triton_op",
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("hub")
    tool.write(into)
    return into


@pytest.fixture(scope="module")
def loaded(tree: Path) -> ModuleType:
    return kernels.get_local_kernel(tree)


@pytest.fixture
def named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's name stands for the tree, in transformers too, which asks for a newer release of kernels."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={tree}")
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(root.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_metadata_are_as_the_package_reads_them(tree: Path) -> None:
    assert {path.name for path in (tree / "build").iterdir()} == {"CARD.md", "torch-cpu", "torch-cuda", "torch-rocm"}
    for backend in tool.BACKENDS:
        variant = tree / "build" / f"torch-{backend}"
        found = Metadata.read_from_file(variant / "metadata.json")
        assert str(found.name) == "flashtile" and found.version == 1 and str(found.backend.backend_type) == backend
        assert found.id.startswith(f"_flashtile_{backend}_") and str(found.kernels_minver) == kernels.__version__
        found.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert {"LICENSE", "py.typed", "backends/hopper/forward/kernel.py"} < set(found.digest.files)
    archs = Metadata.read_from_file(tree / "build" / "torch-cuda" / "metadata.json").backend.archs
    assert archs == ["{}.{}+PTX".format(*portable.ABLE["forward"].min_compute_capability)]


def test_code_is_what_the_hub_asks_for(tree: Path) -> None:
    root = tree / "build" / "torch-cuda"
    name = json.loads((root / "metadata.json").read_text())["id"]
    places, roots, seen = set[Path](), set[str](), set[str]()
    for path, module in modules(root):
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                roots |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
                assert folder.is_relative_to(root)
                places.add(folder)
            elif isinstance(node, ast.ImportFrom):
                roots.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                seen.add(node.value)
            for decorator in getattr(node, "decorator_list", ()):
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                assert getattr(function, "attr", getattr(function, "id", "")) not in _REGISTERING
    assert all(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)
    # compat.install takes two functions of einops where it is there.
    assert {each for each in roots if each not in sys.stdlib_module_names} == {"torch", "triton", "einops"}
    # Names in strings: modules that are there, or beginnings of such; and no other name of the installed package's.
    assert not any(re.fullmatch(r"_?flashtile(?!_cuda)[\w.:]*", each) for each in seen)
    dotted = [each.removeprefix(name).strip(".").replace(".", "/") for each in seen if each.startswith(f"{name}.")]
    assert "backends/gpu/device/mods" in dotted and "api/quantize" in dotted
    assert all((root / each).with_suffix(".py").is_file() or (root / each).is_dir() for each in dotted)


def test_imports_without_a_relative_form_are_refused() -> None:
    assert tool.rewritten("from flashtile.core import masks\nx = f'flashtile.{y}'\n", "a/b/c.py", "_k") == (
        "from ...core import masks\nx = f'_k.{y}'\n"
    )
    with pytest.raises(ValueError, match=r"nn\.py: import flashtile\.masks as m has no relative form"):
        tool.rewritten("import flashtile.masks as m\n", "nn.py", "_k")


@pytest.mark.parametrize(("place", "version"), [("sys.version", "3.9.1 (main)"), ("torch.__version__", "2.10.0+cpu")])
def test_what_it_needs_is_said_at_the_import(
    tree: Path, monkeypatch: pytest.MonkeyPatch, place: str, version: str
) -> None:
    text = (tree / "build" / "torch-cpu" / "__init__.py").read_text()
    ast.parse(text, feature_version=(3, 9))
    monkeypatch.setattr(place, version)
    what = {"sys.version": "Python 3.11", "torch.__version__": "PyTorch 2.11"}[place]
    with pytest.raises(ImportError, match=re.escape(f"flashtile needs {what} or later, this is {version}")):
        exec(compile(text, "__init__.py", "exec"), {"__name__": "too_old"})


def test_functions_beside_the_installed_package(loaded: ModuleType) -> None:
    assert loaded.__name__.startswith("_flashtile_cpu_") and set(flashtile.__all__) < set(loaded.__all__)
    assert all(getattr(loaded, name) is not None for name in loaded.__all__)
    assert loaded.attention is not flashtile.attention and loaded.UnsupportedError is not flashtile.UnsupportedError
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    bounds, other = torch.tensor([0, 4, 9, 18], dtype=torch.int32), torch.randn(2, 1, 2, 16)
    results = []
    for module in (loaded, flash_attn_2):
        dense = module.flash_attn_func(q, k, v, causal=True, window_size=(5, 0), softcap=20.0)
        flat = [x.reshape(18, *x.shape[2:]) for x in (q, k, v)]
        packed = module.flash_attn_varlen_func(*flat, bounds, bounds, 9, 9, causal=True)
        caches = [x.detach().clone() for x in (k, v)]
        cached = module.flash_attn_with_kvcache(
            q[:, :1].detach(), *caches, other, other, cache_seqlens=torch.tensor([3, 8], dtype=torch.int32), causal=True
        )
        grads = torch.autograd.grad(dense.square().sum() + packed.square().sum(), (q, k, v))
        results.append((dense, packed, cached, *caches, *grads))
    for ours, installed in zip(*results, strict=True):
        assert torch.equal(ours, installed)
    one = [x[0].detach().double().repeat_interleave(4 // x.shape[2], 1).transpose(0, 1) for x in (q, k, v)]
    scores = (one[0] @ one[1].mT / 4).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = (scores[:, :4, :4].softmax(-1) @ one[2][:, :4]).transpose(0, 1)
    torch.testing.assert_close(results[0][1][:4].double(), expected, rtol=1e-5, atol=1e-5)


def test_compiled_calls_and_masks_beside_the_installed_package(loaded: ModuleType) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    mask = flex_attention.create_block_mask(lambda b, h, i, j: i - j < 7, None, None, 40, 40, device="cpu")
    found = []
    for module in (loaded, flashtile, loaded):
        graphs: list[Any] = []

        def keep(graph: Any, _: Any, into: list[Any] = graphs) -> Any:
            into.append(graph)
            return graph

        @torch.compile(fullgraph=True, backend=keep)
        def call(q: Any, module: Any = module) -> Any:
            return module.attention(q, k, v, causal=True)

        own = call(q), module.attention(q, k, v, block_mask=mask)
        found.append((*own, module.attention(q, k, v, score_mod=lambda score, b, h, i, j: score * 1.5 + i)))
        (graph,) = graphs
        (target,) = {str(node.target) for node in graph.graph.nodes if "attention_forward" in str(node.target)}
        assert target.partition(".")[0] == module.__name__
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    own = flashtile.create_block_mask(lambda b, h, i, j: i - j < 7, None, None, 40, 40, device="cpu")
    with pytest.raises(loaded.InvalidInputError, match=rf"must be made by {loaded.__name__}\.masks or"):
        loaded.attention(q, k, v, block_mask=own)


def test_archives_know_the_sources_of_kernels(loaded: ModuleType) -> None:
    own = importlib.import_module(f"{loaded.__name__}.backends.gpu.ahead")
    for place in ("backends.portable.backward.kernel", "backends.hopper.forward.kernel"):
        files = ahead.files_of(f"flashtile.{place}")
        assert len(files) > 5 and own.files_of(f"{loaded.__name__}.{place}") == files


@pytest.mark.long
def test_kernels_build(loaded: ModuleType) -> None:
    pytest.importorskip("triton")
    like = [torch.empty(1, 64, 2, 32, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    doubled = lambda score, b, h, i, j: score * 2  # noqa: E731
    for module in (loaded, flashtile):
        made = module.warm_up(*like, device="cuda", backward=False, gpu="sm_80", causal=True, score_mod=doubled)
        assert [each.kernel for each in made] == ["attention_forward"]


@pytest.mark.usefixtures("named")
def test_a_model_of_transformers_as_with_enable() -> None:
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = dict(vocab_size=64, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    models = [hf.LlamaForCausalLM(hf.LlamaConfig(**config)).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    enable(models[0])
    models[1].set_attn_implementation(NAME, allow_all_kernels=True)
    tokens = torch.randint(2, 64, (2, 9))
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    for mask in (torch.ones_like(tokens), padding):
        ours, theirs = (
            each.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False) for each in models
        )
        assert ours.shape == (2, 15) and torch.equal(ours, theirs)
    for each in models:
        each.train()
        step = torch.optim.SGD(each.parameters(), lr=0.1)
        each(tokens, attention_mask=padding, labels=tokens.masked_fill(padding == 0, -100)).loss.backward()
        step.step()
    for ours, theirs in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert ours.grad is not None and ours.grad.abs().sum() > 0


@pytest.mark.usefixtures("named")
def test_the_page_s_code_runs_and_the_card_is_the_page(tree: Path) -> None:
    page = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(block, namespace)
    assert namespace["q"].grad.abs().sum() > 0 and namespace["model"].config._attn_implementation == NAME
    card = (tree / "build" / "CARD.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: kernels\n") and ".md)" not in card and "## Publish it" in card
