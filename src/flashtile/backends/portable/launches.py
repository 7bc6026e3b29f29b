"""The portable kernels of a call, so that they can be built before it."""

from __future__ import annotations

from typing import Any

from flashtile.backends.gpu.decode.config import as_cached, splits_keys
from flashtile.backends.gpu.launch import Launch
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem


def launches(problem: Problem, tensors: Any, direction: Direction) -> dict[str, Launch]:
    """The kernels of a direction of a call, by name, in the order in which they run."""
    if direction == "quantized":
        from flashtile.backends.portable.quantized import config as quantized_config
        from flashtile.backends.portable.quantized import launch as quantized

        tiles = quantized_config.choose(problem)
        return {"attention_quantized": quantized.quantized_launch(problem, tensors, tiles)}
    splits = direction == "forward" and splits_keys(problem)
    if direction == "decode" or splits:
        from flashtile.backends.gpu.decode import launch as decode
        from flashtile.backends.gpu.decode.launch import DecodePlan
        from flashtile.backends.gpu.decode.split_forward import cached_tensors

        call = (as_cached(problem), cached_tensors(tensors)) if splits else (problem, tensors)
        return decode.launches(DecodePlan, *call)
    if direction == "forward":
        from flashtile.backends.portable.forward import config, launch

        return {"attention_forward": launch.forward_launch(problem, tensors, config.choose(problem))}
    from flashtile.backends.portable.backward import launch as backward_launch

    dout = tensors.q.new_empty((*tensors.q.shape[:-1], problem.head_dim_v))
    return backward_launch.launches(problem, tensors, dout, None)
