"""The process of one checkout in ``benchmarks.against``: cases and providers are the checkout's, the timing is not.

Started as a script with PYTHONPATH on a checkout; its ``benchmarks`` may be older than this file. For each JSON line
that it reads it writes one: ``{"do": "prepare", "case", "provider"}`` checks a cell and keeps its call; ``{"do":
"time", "reps", "head_start_ms"}`` times a burst of it.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import IO, Any


def load_timing() -> Any:
    """``timing`` from this file's folder, so that both checkouts are timed by the same code."""
    spec = importlib.util.spec_from_file_location("burst_timing", Path(__file__).with_name("timing.py"))
    assert spec and spec.loader
    module = sys.modules["burst_timing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(device_type: str, requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until the input ends."""
    import torch

    from benchmarks.cases import Case, make_inputs
    from benchmarks.checks import Reference
    from benchmarks.providers import PROVIDERS

    timing, device = load_timing(), torch.device(device_type)

    def prepared(fields: dict[str, Any], name: str) -> tuple[Any, float]:
        case, provider = Case.from_dict(fields), PROVIDERS[name]
        inputs = make_inputs(case, device)
        refusal = provider.refusal(case, inputs)
        if refusal is not None:
            raise RuntimeError(f"refused: {refusal}")
        reference = Reference(case, inputs)
        call = provider.prepare(case, inputs)
        error = reference.error(native(provider, call(), case))
        if not error <= reference.limit:
            raise RuntimeError(f"wrong: relative error {error:.3g}, limit {reference.limit:.3g}")
        return call, error

    def native(provider: Any, outputs: Any, case: Any) -> Any:
        return provider.native(outputs, case) if hasattr(provider, "native") else outputs

    call: Any = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            with torch.no_grad():
                if request["do"] == "prepare":
                    call = None
                    call, answer["error"] = prepared(request["case"], request["provider"])
                    answer |= {"ms": timing.time_burst(call, 2, device), "host_ms": timing.host_ms(call, device)}
                else:
                    answer["ms"] = timing.time_burst(call, request["reps"], device, request["head_start_ms"])
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Output of libraries must not be mixed with the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, replies)
