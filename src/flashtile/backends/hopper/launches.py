"""The Hopper kernels of a call, so that they can be built before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.gpu.decode.config import as_cached, splits_keys
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.hopper.forward.config import by_bits
from flashtile.backends.portable import repair
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem


def launches(problem: Problem, tensors: Any, direction: Direction) -> dict[str, Launch]:
    """The kernels of a direction of a call, by name, in the order in which they run."""
    if direction == "quantized":
        from flashtile.backends.hopper.quantized import config as quantized_config
        from flashtile.backends.hopper.quantized import launch as quantized

        tiles = quantized_config.choose(problem)
        return {"attention_quantized": quantized.quantized_launch(problem, tensors, tiles)}
    splits = direction == "forward" and splits_keys(problem)
    if direction == "decode" or splits:
        from flashtile.backends.gpu.decode import launch as decode
        from flashtile.backends.gpu.decode.split_forward import cached_tensors
        from flashtile.backends.hopper.decode.launch import CachedPlan

        call = (as_cached(problem), cached_tensors(tensors)) if splits else (problem, tensors)
        return decode.launches(CachedPlan, *call)
    made = _regular(by_bits(problem), tensors, direction)
    if direction == "forward":
        return made | repair.forward_launches(problem, tensors)
    flag_rows = _backward_config(problem).choose(by_bits(problem)).block_m
    return made | repair.backward_launches(problem, tensors, _like_dout(problem, tensors), flag_rows)


def _backward_config(problem: Problem) -> Any:
    from flashtile.backends.hopper.backward import config
    from flashtile.backends.hopper.big_backward import config as big_config

    return big_config if max(problem.head_dim, problem.head_dim_v) > 256 else config


def _like_dout(problem: Problem, tensors: Any) -> Tensor:
    dout: Tensor = tensors.q.new_empty((*tensors.q.shape[:-1], problem.head_dim_v))
    return dout


def _regular(problem: Problem, tensors: Any, direction: Direction) -> dict[str, Launch]:
    if direction == "forward" and max(problem.head_dim, problem.head_dim_v) > 256:
        from flashtile.backends.hopper.big_heads import config as big_config
        from flashtile.backends.hopper.big_heads import launch as big_heads

        columns = big_config.choose(problem, None, tensors.q.shape[-3])
        return big_heads.launches(problem, tensors, columns)
    if direction == "forward":
        from flashtile.backends.hopper import tensor_maps
        from flashtile.backends.hopper.forward import config, launch

        chosen = config.choose(problem, tensor_maps.score_bytes(tensors), tensors.q.shape[-3])
        return launch.launches(problem, tensors, chosen)
    dout = _like_dout(problem, tensors)
    if max(problem.head_dim, problem.head_dim_v) > 256:
        from flashtile.backends.hopper.big_backward import launch as big_backward

        return big_backward.launches(problem, tensors, dout, None, _backward_config(problem).choose(problem))
    from flashtile.backends.hopper.backward import launch as backward_launch

    return backward_launch.launches(problem, tensors, dout, None, _backward_config(problem).choose(problem))
