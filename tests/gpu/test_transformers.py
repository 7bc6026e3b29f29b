"""On a GPU (``pytest -m gpu``): transformers' models against their eager attention, in float32 and bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig

from flashtile.integrations.transformers import calls, enable
from tests.integrations.test_transformers import (
    MODELS,
    compare_together,
    inputs,
    judge,
    make,
    results,
    softmax_in_float64,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "bert", "t5"])
def test_float32(name: str, padding: str) -> None:
    given = {key: x.to(DEVICE) for key, x in inputs(name, padding).items()}
    # Together: a gradient of four elements, such as a router's bias, may come out exact by chance.
    judge(make(name).to(DEVICE), given, MODELS[name][2], by=compare_together)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "t5"])
def test_bfloat16(name: str) -> None:
    model = make(name).to(DEVICE, torch.bfloat16)
    given = {key: x.to(DEVICE) for key, x in inputs(name, "right").items()}
    with softmax_in_float64():
        exact = results(copy.deepcopy(model).double(), given)
    plain = results(model, given)
    enable(model)
    calls.clear()
    got = results(model, given)
    assert calls.served == MODELS[name][2]
    compare_together(got, exact, plain)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_generate(name: str) -> None:
    """With a static cache ``generate`` compiles the decoding step and records CUDA graphs."""
    model = make(name).to(DEVICE).eval()
    given = {key: x.to(DEVICE) for key, x in inputs(name, "left").items()}
    want = model.generate(**given, max_new_tokens=9, do_sample=False)
    enable(model)
    # transformers' experts are a loop over what a tensor holds.
    static = {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=name != "gpt_oss")}
    for kind in ({}, static):
        assert torch.equal(model.generate(**given, max_new_tokens=9, do_sample=False, **kind), want)
