"""torch.compile where it runs a call without tracing it: it must not compile what the backend does then."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, since what is skipped stays so.
_CALL = """
import torch, flashtile
from flashtile.ops import operators

lines = set()

def keep(graph, _inputs):
    traces = (node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
    lines.update(line for trace in traces for line in trace.splitlines() if "File" in line)
    return graph

# As after more recompilations than are allowed: these run as they are, and what they call is traced.
for function in (flashtile.attention, operators.attention):
    torch._dynamo.decorators.skip(function)

@torch._dynamo.disable(recursive=False)
def attend(q):
    return flashtile.attention(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool))

q = torch.randn(1, 8, 2, 16, requires_grad=True)
run = torch.compile(lambda q: attend(q * 2) + 1, backend=keep)
for _ in range(2):
    run(q).sum().backward()
    run(q.detach())
print(*lines, sep="\\n")
"""


def test_backends_are_not_compiled() -> None:
    """Inductor cannot compile the view of a mask as bytes, which a plan takes."""
    done = subprocess.run([sys.executable, "-c", _CALL], capture_output=True, text=True, check=True)
    assert "flashtile/ops" in done.stdout  # the way there is traced
    assert "flashtile/backends" not in done.stdout
