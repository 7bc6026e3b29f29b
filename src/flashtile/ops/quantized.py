"""The operator of quantized calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.call.quantized_arguments import QuantizedOptions, QuantizedTensors
from flashtile.call.quantized_problem import check_values, problem_of
from flashtile.ops import flops
from flashtile.ops.operation import Operation, is_watched


def attend(t: QuantizedTensors, options: QuantizedOptions) -> tuple[Tensor, Tensor]:
    """Runs a quantized call: through its operator, or directly where the dispatcher is not needed.

    Returns:
        out and lse, as in ``call.backend.QuantizedForward``.
    """
    found: tuple[Tensor, Tensor]
    if is_watched(t.q, t.k, t.v):
        found = OPERATOR.overload(*QUANTIZED.flatten(t, options))
        return found
    QUANTIZED.check_types(t)
    t, call = QUANTIZED.planned(t, options)
    found = call.run(t)
    return found


QUANTIZED = Operation("a quantized call", "quantized", QuantizedTensors, QuantizedOptions, problem_of, check_values)


def _flops(given: dict[str, Any]) -> int:
    """As ``flops.forward_flops``: two products; v is transposed."""
    return 2 * flops.kept_pairs(given) * (given["q"][-1] + given["v"][-2])


OPERATOR = QUANTIZED.define("attention_quantized", QUANTIZED.run, QUANTIZED.fake, flops=_flops)
