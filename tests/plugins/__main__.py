"""Whole engines with flashtile against the same with their own attention: ``python -m tests.plugins ENGINE FOLDER``.

Each run is a process of its own. Fails unless all tokens are equal and the control, scores a tenth smaller, changes
what follows every prompt. Checkpoints and tokens are kept in the folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tests.plugins.sglang_cpu  # noqa: F401  # before transformers
from tests.plugins import models


class Runs:
    """The runs of one engine."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.failed = 0

    def tokens(self, model: str, whose: str, **more: Any) -> Any:
        """What the engine writes, and how many of its attention calls flashtile ran."""
        name, start_s = "-".join([model, whose, *map(str, more.values())]), time.perf_counter()
        file = self.folder / f"{self.engine}-{name}.json"
        accepted = Path(f"{file}.accepted")
        for each in (file, accepted):
            each.unlink(missing_ok=True)
        what, log = [str(self.folder / model), str(file), whose, json.dumps(more)], file.with_suffix(".log")
        command = [sys.executable, "-m", f"tests.plugins.run_{self.engine}", *what]
        with log.open("w") as opened:
            code = subprocess.run(command, stdout=opened, stderr=subprocess.STDOUT).returncode
        if not file.exists():
            raise SystemExit(f"{self.engine} {name}: ended with {code}, see {log}\n{log.read_text()[-3000:]}")
        found = json.loads(file.read_text())
        found["told"] = "attention runs with flashtile" in log.read_text()
        found["seconds"] = time.perf_counter() - start_s
        if accepted.exists():
            found["accepted"] = [json.loads(line) for line in accepted.read_text().splitlines()]
        return found

    def judge(self, name: str, got: Any, want: Any, same: int | None = None) -> None:
        """Prints how many outputs are equal, and counts it a failure if it is not ``same`` (all), or none is ours."""
        pairs = [(a["tokens"], b["tokens"]) for a, b in zip(got["outputs"], want["outputs"], strict=True)]
        equal, cached = sum(a == b for a, b in pairs), sum(x["cached"] or 0 for x in got["outputs"])
        good = equal == (len(pairs) if same is None else same) and got.get("calls", 1) > 0 and got["told"]
        ran = f"{got['calls']} calls by flashtile" if "calls" in got else "by flashtile"
        distinct = len({token for tokens, _ in pairs for token in tokens})
        what = f"{equal} of {len(pairs)} outputs equal, {distinct} different tokens, {cached} tokens from the cache"
        print(f"{self.engine} {name}: {what}, {ran}, {got['seconds']:.0f} s{'' if good else ': FAILED'}", flush=True)
        self.failed += not good


def vllm(runs: Runs) -> None:
    """All models against vLLM's own attention, two with other settings."""
    for model in models.CONFIGS:
        stock = runs.tokens(model, "stock")
        runs.judge(model, runs.tokens(model, "ours"), stock)
        if model == "llama":
            runs.judge("llama, blocks of 32", runs.tokens(model, "ours", block_size=32), stock)
            runs.judge("llama, compiled", runs.tokens(model, "ours", enforce_eager=False), stock)
        runs.judge(f"{model}, scores a tenth smaller", runs.tokens(model, "broken"), stock, same=0)


def sglang(runs: Runs) -> None:
    """SGLang's own cases, then models against transformers, and llama against SGLang's attention in plain PyTorch.

    That attention leaves out softcaps and sinks; and mistral is not here, as SGLang tells no backend of its window.
    """
    runs.failed += subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.plugins.kit_sglang"]).returncode
    for model in ("llama", "gemma2", "gpt_oss"):
        want = {"outputs": [{"tokens": tokens} for tokens in models.eager(model)] * 2}
        ours = runs.tokens(model, "ours")
        runs.judge(model, ours, want)
        if model == "llama":
            runs.judge("llama against its own attention", ours, runs.tokens(model, "stock"))
            runs.judge("llama, pages of 16", runs.tokens(model, "ours", page_size=16), want)
            runs.judge("llama, mixed chunks", runs.tokens(model, "ours", enable_mixed_chunk=True), want)
            for what, topk, rows, page_size in (("a tree", 3, 12, 1), ("a chain, pages of 16", 1, 5, 16)):
                how = dict(speculative_algorithm="STANDALONE", speculative_num_steps=4, speculative_eagle_topk=topk)
                how |= dict(speculative_num_draft_tokens=rows, page_size=page_size)
                drafts = runs.tokens(model, "ours", **how)
                runs.judge(f"llama, drafts in {what}", drafts, want)
                # A tree is needed where others than its first rows are accepted.
                apart = sum(rows != [*range(len(rows))] for rows in drafts["accepted"])
                told = f"{sum(map(len, drafts['accepted']))} tokens in {len(drafts['accepted'])} rounds"
                print(f"sglang llama, drafts in {what}: {told}, {apart} of rows that lie apart", flush=True)
                runs.failed += (apart > 0) != (topk > 1)
        runs.judge(f"{model}, scores a tenth smaller", runs.tokens(model, "broken"), want, same=0)


ENGINES = {"vllm": vllm, "sglang": sglang}


def main(engine: str, folder: str) -> int:
    """Runs an engine's comparisons; returns how many failed."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    models.write(place)
    runs = Runs(engine, place)
    ENGINES[engine](runs)
    return runs.failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
