"""Small random models whose next token hangs on their attention, and the prompts that they are asked.

Weights as they are usually drawn make attention so even that a wrong one changes no token. Here queries and keys are
drawn larger, so that scores differ by several units.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf

VOCABULARY, NEW_TOKENS, WINDOW = 512, 16, 24
SCORES, OTHERS = 2.0, 1.0  # what a product with a weight multiplies a vector's length by
DRAFTER_NOISE = 0.03
# gemma2's output is its input's embedding, which it would repeat if attention and the layers behind it added little.
GEMMA2_NORMS = {"post_attention_layernorm": 20.0, "post_feedforward_layernorm": 5.0}

_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
# Plain; a window in all layers; windows in every other one and a softcap; windows and sinks. SGLang reads
# gemma2's hidden_act.
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_SIZES),
    "mistral": lambda: hf.MistralConfig(**_SIZES, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **_SIZES | {"tie_word_embeddings": True}, sliding_window=WINDOW, query_pre_attn_scalar=32,
        attn_logit_softcapping=20.0, final_logit_softcapping=None, hidden_act="gelu_pytorch_tanh",
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**_SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def make(name: str, noise: float = 0.0) -> Any:
    """The model in float32, for inference; every call gives the same weights, with so much noise beside them."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("sinks"):
                weight.normal_(std=2.0)
            elif weight.dim() > 1:
                gain = SCORES if "q_proj" in key or "k_proj" in key else OTHERS
                weight.normal_(std=gain / weight.shape[-1] ** 0.5)
            elif name == "gemma2" and (norm := key.split(".")[-2]) in GEMMA2_NORMS:
                weight.fill_(GEMMA2_NORMS[norm])
        for weight in model.parameters():
            if noise and weight.dim() > 1:
                weight += noise * weight.std() * torch.randn_like(weight)
    return model.eval()


def prompts() -> list[list[int]]:
    """Ten prompts of 1 to 207 tokens, five of which have 200 in common."""
    draw = random.Random(0)
    alone = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 150, 33, 1, 80)]
    common = [draw.randrange(3, VOCABULARY) for _ in range(200)]
    return alone + [common + prompt[:7] for prompt in alone]


def eager(name: str) -> list[list[int]]:
    """What transformers' eager attention makes a model write: the prompts in one batch, with padding before them."""
    model, asked = make(name), prompts()
    model.set_attn_implementation("eager")
    longest = max(map(len, asked))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in asked])
    how = hf.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return model.generate(tokens, attention_mask=(tokens > 0).long(), generation_config=how)[:, longest:].tolist()


def write(folder: Path) -> None:
    """Saves each model as a checkpoint, and a drafter for the first, once."""
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    made = {name: (name, 0.0) for name in CONFIGS} | {"llama_drafter": ("llama", DRAFTER_NOISE)}
    for name, how in made.items():
        if not (folder / name / "config.json").exists():
            make(*how).save_pretrained(folder / name)
