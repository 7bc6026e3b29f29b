"""Asks SGLang the prompts, twice, and writes the tokens; arguments are MODEL FILE WHOSE SETTINGS.

WHOSE is "stock", "ours" or "broken". SGLang's processes import this module too, with the same arguments.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import flashtile
import tests.plugins.sglang_cpu
from flashtile.integrations import sglang as ours
from tests.plugins import models

MODEL, FILE, WHOSE, SETTINGS = sys.argv[1:]
# SGLang takes gpt-oss with backends of a closed list alone, so there ours runs under one of their names.
NAME = "triton" if MODEL.endswith("gpt_oss") else ours.NAME

HOW = json.loads(SETTINGS)
if "speculative_algorithm" in HOW:
    import tests.plugins.sglang_drafts  # noqa: F401

    HOW["speculative_draft_model_path"] = f"{MODEL}_drafter"
    os.environ["ACCEPTED"] = f"{FILE}.accepted"
if NAME != ours.NAME:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(ours.create)
if WHOSE == "broken":
    attend: Any = flashtile.attention_with_kvcache

    def smaller(*tensors: Any, softmax_scale: float, **others: Any) -> Any:
        return attend(*tensors, softmax_scale=0.9 * softmax_scale, **others)

    flashtile.attention_with_kvcache = smaller


def main() -> None:
    import sglang

    settings = dict(
        model_path=MODEL, device="cpu", attention_backend="torch_native" if WHOSE == "stock" else NAME,
        skip_tokenizer_init=True, dtype="float32", context_length=512, mem_fraction_static=0.3, max_total_tokens=8192,
        max_running_requests=8, disable_cuda_graph=True, chunked_prefill_size=64, random_seed=0, log_level="info",
        disable_overlap_schedule=True,
    )  # fmt: skip
    engine = sglang.Engine(**settings | HOW)
    how, found = {"temperature": 0, "max_new_tokens": models.NEW_TOKENS, "ignore_eos": True}, []
    for _ in range(2):  # the second time the prompts are in the cache
        for each in engine.generate(input_ids=models.prompts(), sampling_params=how):
            found.append({"tokens": each["output_ids"], "cached": each["meta_info"]["cached_tokens"]})
    with open(FILE, "w") as opened:
        json.dump({"outputs": found}, opened)
    engine.shutdown()


if __name__ == "__main__":
    main()
