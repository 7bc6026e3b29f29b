"""Functions in code that torch.compile traces: it traces them itself, and so guards everything that they read.

``lowered`` then asks ``RECORDED`` about a function. A function may be made in the traced code, and capture tensors that
are computed there: torch.compile's graph of the function shows the tensors and numbers that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule

from flashtile.mods import record
from flashtile.mods.reading import TraceError
from flashtile.mods.trace import Traced, trace

_is_mapped = torch._C._functorch.is_functorch_wrapped_tensor


class _Recorded(HigherOrderOperator):
    """Maps ``(f, argument, what, device)`` to a function's record, its inputs, and whether these are transformed."""

    def __init__(self) -> None:
        super().__init__("flashtile_recorded")

    def __call__(self, f: Any, argument: str, what: str, device: torch.device) -> tuple[Any, ...]:
        """Runs for a function that torch.compile cannot trace and therefore leaves to Python."""
        kept, tensors, numbers = record.recorded(f, argument, what)
        return kept, tensors, numbers, any(map(_is_mapped, tensors))


class _Variable(hops.TorchHigherOrderOperatorVariable):
    """``RECORDED`` as torch.compile sees it."""

    _HOP_NAME = "flashtile_recorded"

    def _call_function(self, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Older releases call this method directly.
        f, argument, what, device = args
        is_score = what.as_python_constant() == "score"
        given = _inputs(tx, is_score, device.as_python_constant())
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():  # Python does not need an index's value
            _, graph, lifted = hops.speculate_subgraph(
                tx, f, given, {}, description=argument.as_python_constant(), source_target=self.value,
                set_subgraph_inputs="flatten_manual", restore_side_effects=False,
            )  # fmt: skip
        for node in list(graph.nodes):
            # A float that may vary is a tensor for torch.compile and for kernels.
            if node.op == "call_method" and node.target == "item" and node.args[0].op == "placeholder":
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        body = GraphModule(tx.output.nn_modules, graph)
        proxies = list(lifted)
        examples = [proxy.node.meta["example_value"] for proxy in proxies]
        try:
            traced, tensors, numbers = _traced(body, what.as_python_constant(), examples)
        except TraceError as error:  # without a whole graph the call itself reports the error, with the user's line
            raise Unsupported(f"{argument.as_python_constant()}: {error}") from error
        kept = _constants(record.parted(traced))
        alias = torch.ops.aten.alias.default
        found = [wrap_fx_proxy(tx, tx.output.create_proxy("call_function", alias, (proxies[n],), {})) for n in tensors]
        read = [SymNodeVariable.create(tx, proxies[n], examples[n]) for n in numbers]
        build = VariableTracker.build
        is_mapped = any(_is_mapped(x) for x in examples if isinstance(x, torch.Tensor))
        whole = [build(tx, kept), TupleVariable(found), TupleVariable(read), build(tx, is_mapped)]
        return TupleVariable(whole)

    call_function = _call_function


def _inputs(tx: Any, is_score: bool, device: torch.device) -> list[Any]:
    """One score, if the function takes one, and indices, as torch.compile's tensors."""
    build = VariableTracker.build
    with hops.discard_graph_changes(tx):
        whole = {"dtype": build(tx, torch.int32), "device": build(tx, device)}
        indices = [build(tx, torch.empty).call_function(tx, [build(tx, ())], whole) for _ in range(4)]
        if not is_score:
            return indices
        # The score has a gradient; otherwise a function's own derivative would be lost.
        real = {"dtype": build(tx, torch.float32), "requires_grad": build(tx, torch.is_grad_enabled())}
        return [indices[0].call_method(tx, "new_empty", [build(tx, ())], real), *indices]


def _traced(body: GraphModule, what: str, read: Sequence[Any]) -> tuple[Traced, list[int], list[int]]:
    """A function's graph from torch.compile's graph, and the places of tensors and of numbers among its inputs."""
    tensors = [n for n, x in enumerate(read) if isinstance(x, torch.Tensor)]
    numbers = symbols = [n for n, x in enumerate(read) if not isinstance(x, torch.Tensor)]

    def bound(number: Callable[[int], Any]) -> Callable[..., Any]:
        values = list(read)
        for place, n in enumerate(symbols):
            values[n] = number(place)
        return lambda *given: body(*given, *values)

    real = [read[n] for n in tensors]
    try:
        traced = trace(bound, what, real, [read[n] for n in numbers])
    except TraceError:
        # Numbers are then constants, which torch.compile guards once Python has their values.
        plain = [float(read[n]) if isinstance(read[n], torch.SymFloat) else int(read[n]) for n in numbers]
        numbers, traced = [], trace(lambda _: bound(plain.__getitem__), what, real)
    if len(traced.tensors) > len(real):
        raise TraceError("reads a tensor that torch.compile has not found")
    return traced, tensors, numbers


def _constants(x: Any) -> Any:
    """Tuples of plain values alone, which torch.compile takes as constants."""
    if isinstance(x, tuple):
        return tuple(map(_constants, x))
    return int(x) if isinstance(x, torch.SymInt) else x


RECORDED = _Recorded()
hops._hop_name_to_variable_class["flashtile_recorded"] = _Variable
