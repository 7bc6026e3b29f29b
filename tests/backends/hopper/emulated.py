"""Lets the Hopper backend run on CPU tensors, its kernels in the emulator, everything else as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl

from flashtile.backends.gpu import host
from flashtile.backends.gpu.device import dropout
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.hopper import BACKEND, tensor_maps
from flashtile.backends.hopper.backward import config as backward_config
from flashtile.backends.hopper.device import cluster, inline_ptx
from flashtile.backends.hopper.device.gluon_compat import tma_add
from flashtile.backends.hopper.forward import config as forward_config
from flashtile.backends.hopper.forward import launch
from flashtile.core import philox
from flashtile.ops import plans
from tests import emulator
from tests.emulator.language import elementwise, select
from tests.emulator.values import Value, value_of


def in_order(probs: Any) -> Any:
    """[M, N] probabilities, each 16 of their keys in the order of ``quantization.blocks.ORDER``."""
    rows, keys = probs.shape
    return probs.reshape([rows, keys // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, keys])


WORD = 2**32 - 1
BACKWARD_TILES = {
    n: each for n, each in vars(backward_config).items() if isinstance(each, backward_config.BackwardTiles)
}


def philox_key_of(call: Any, b: Any, h: Any) -> Any:
    """``dropout.philox_key_of`` by its definition: the emulator has no unsigned words."""
    if call.mods.dropout.rng_state_ptr is None:
        return ()
    state = torch.stack([(call.mods.dropout.rng_state_ptr + i).load().data for i in range(2)])
    return tuple(Value(x) for x in philox.philox_keys(state, value_of(b * call.heads.num_q + h).data.long()))


def words(philox_key: Any, rows: Any, keys: Any, ptx: bool) -> Any:
    """``dropout.words``, likewise."""
    of_head = [x.data for x in philox_key]
    return tuple(Value(x) for x in philox.words(of_head, value_of(rows).data.long(), value_of(keys).data.long()))


def keep_tile(drops: Any, philox_key: Any, b: Any, row: Any, key: Any, m: int, n: int) -> Any:
    """``dropout.keep_tile`` of the portable kernels, likewise; Hopper's calls have no origins."""
    assert drops.origins_ptr is None
    first = [value_of(x).data.long() for x in (row, key)]
    rows, keys = first[0] + torch.arange(m)[:, None], first[1] + torch.arange(n)
    pair = philox.words([x.data for x in philox_key], philox.without_8(rows), philox.without_8(keys))
    word = torch.where(rows & 8 == 0, *pair)
    return Value(torch.where(keys & 8 == 0, word << 16 & WORD, word) >= (int(drops.threshold) & WORD))


def keep_by_bits(t: Any, numbers: Any, count: int, fill: str) -> Any:
    """A thread's own columns of a row are counted by dimensions 1 and 3."""
    places = 2 * torch.arange(t.shape[1])[:, None, None] + torch.arange(2)
    kept = numbers.data.long()[:, None, :, None] >> places & 1
    return select(Value(kept != 0), t, {"0f00000000": 0.0, "0fFF800000": -torch.inf}[fill])


# What the inline PTX means, and the name that only the newest Triton has.
REPLACEMENTS: dict[Any, Callable[..., Any] | str] = {
    inline_ptx.compute_before_wait: lambda x: x,
    inline_ptx.select_at_least: lambda x, words, limit, fill: select(
        (words & WORD) >= (value_of(limit).to(tl.int64) & WORD), x, fill
    ),
    dropout.philox_key_of: philox_key_of,
    dropout.words: words,
    dropout.keep_tile: keep_tile,
    inline_ptx.keep: lambda x, words, fill, bits: select((words & bits) != 0, x, fill),
    inline_ptx.keep_by_bits: keep_by_bits,
    inline_ptx.compute_before_barrier: lambda x: x,
    inline_ptx.compute_before_fence: lambda x: x,
    inline_ptx.widen: lambda x: x.to(tl.float32),
    inline_ptx.rescale: lambda acc, factor, width: acc * factor[:, None],
    inline_ptx.least_integers: lambda numbers, signs: functools.reduce(elementwise(torch.minimum), numbers),
    # Ping-pong barriers decide who is first, not what comes out.
    inline_ptx.pingpong_wait: lambda x, group, strict=False: x,
    inline_ptx.pingpong_arrive: lambda x, group, strict=False: x,
    tma_add: "reduce_out",
    inline_ptx.from_e4m3: lambda x: x.to(tl.float32),
    inline_ptx.packed: lambda e: e,
    inline_ptx.packed_operand: lambda e, width: in_order(e.to(tl.float8e4nv)),
    inline_ptx.plus: lambda acc, factor, t: acc * factor[:, None] + t,
    inline_ptx.in_place: lambda x: x,
    cluster.cluster_sync: "cluster_sync",
    cluster.fill_with_addresses: lambda: None,
    cluster.address_of: "address_of",
    cluster.barrier_address: "address_of",
    cluster.arrive_at_other: "arrive_at_other",
    cluster.copy_to_other: "copy_to_other",
    cluster.multicast_box: "multicast_box",
}

# Runs a kernel: (kernel, programs, arguments by name, compiler options).
Run = Callable[[Launch], None]


def forget_plans() -> None:
    """Drops what was planned for other kernels or tiles."""
    launch._counters.clear()
    tensor_maps._num_sms.cache_clear()
    plans.kept = OrderedDict()


@contextmanager
def with_kernels(
    run: Run,
    num_sms: int,
    forward: forward_config.ForwardTiles | None = None,
    backward: backward_config.BackwardTiles | None = None,
) -> Iterator[None]:
    """Within, ``backend="hopper"`` takes CPU tensors, as if of a device with ``num_sms`` multiprocessors.

    Args:
        run: Runs a kernel.
        num_sms: Multiprocessors of the device.
        forward: Tiles to use instead of the chosen ones.
        backward: The same for the backward.
    """
    here: dict[str, Any] = {"device_types": ("cpu",), "min_compute_capability": None, "max_compute_capability": None}
    properties = SimpleNamespace(multi_processor_count=num_sms)
    patches: list[tuple[Any, str, Any]] = [
        (BACKEND, "able", {each: dataclasses.replace(able, **here) for each, able in BACKEND.able.items()}),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (host, "interpret", run),
    ]
    if forward is not None:
        patches.append((forward_config, "choose", lambda problem, *_, **given: forward))
    if backward is not None:
        patches.append((backward_config, "choose", lambda problem: backward))
    forget_plans()
    with ExitStack() as entered:
        for place, name, value in patches:
            entered.enter_context(mock.patch.object(place, name, value))
        yield
    forget_plans()


@contextmanager
def on_cpu(
    seed: int = 0,
    num_sms: int = 3,
    forward: forward_config.ForwardTiles | None = None,
    backward: backward_config.BackwardTiles | None = None,
    ordered_sums: bool = False,
) -> Iterator[None]:
    """``with_kernels`` of the emulator; ``seed`` draws the order of events, ``ordered_sums`` as for ``launch``."""

    def run(launch: Launch) -> None:
        in_order = [launch.arguments[name] for name in launch.kernel.arg_names]
        emulator.launch(
            launch.kernel, (launch.programs,), in_order, replacements=REPLACEMENTS, seed=seed,
            ordered_sums=ordered_sums, cluster=launch.cluster,
        )  # fmt: skip

    with with_kernels(run, num_sms, forward, backward):
        yield
