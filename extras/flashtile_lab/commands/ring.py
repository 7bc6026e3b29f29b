"""`flashtile-lab analyze ring`: attention over many devices, by a model."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, cast

import typer

from flashtile.cli.options import AsJson, integers
from flashtile_lab import analysis
from flashtile_lab.analysis import Cluster, Link, RingShape
from flashtile_lab.commands.options import MAX_SIZE, Dtype, HeadDim, facts, show, units

_ms, _gb = units(1e-3, 2), units(1e9, 2)
_INNER, _OUTER = analysis.H200_CLUSTER.inner, analysis.H200_CLUSTER.outer
_GPUS = ["2,8,64,512,4096"]
_TOKENS = ["8k"]

_CAPTION = (
    "A model, not a measurement, of each GPU: the plan's steps, each as long as the slowest rank's, at the rates of "
    "{name}; running outputs and sums read and written once a step; transfers at {inner:g} GB/s and {inner_us:g} us, "
    "across nodes of {node} at {outer:g} GB/s and {outer_us:g} us, without congestion and at no cost to kernels. "
    "GB sent by the slowest; of least: keys that arrive over what blocks of 128 need; fullest: pairs over the mean. "
    "Kernels and waiting, for transfers that no kernel hides, in ms. Share: one device's time for the whole sequence "
    "over N, by the model's. flashtile_lab.analysis.ring lists what is assumed."
)


def ring(
    gpus: Annotated[list[str], typer.Option(help="Devices; several by commas.")] = _GPUS,
    tokens: Annotated[list[str], typer.Option(help="Rows of each device; commas; 4k is 4096.")] = _TOKENS,
    heads: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Query heads.")] = 32,
    heads_kv: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Key-value heads.")] = 8,
    head_dim: HeadDim = 128,
    causal: Annotated[bool, typer.Option(help="Key j is kept for query i when j <= i.")] = True,
    window: Annotated[int | None, typer.Option(min=0, max=MAX_SIZE, help="Keys kept before the diagonal.")] = None,
    layout: Annotated[str, typer.Option(help="contiguous, zigzag, striped or deal.")] = "zigzag",
    document: Annotated[int | None, typer.Option(min=1, max=MAX_SIZE, help="Rows of each packed document.")] = None,
    scheme: Annotated[str, typer.Option(help="How keys travel: ring or allgather.")] = "ring",
    ulysses: Annotated[
        int, typer.Option(min=1, help="Devices that exchange rows for heads; the rest is the ring.")
    ] = 1,
    backward: Annotated[bool, typer.Option("--backward", help="The backward alone, not the forward.")] = False,
    tflops: Annotated[float | None, typer.Option(help="One rate for all kernels, instead of the table.")] = None,
    node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    gb_per_s: Annotated[float, typer.Option(help="Link within a node, each way.")] = _INNER.bytes_per_s / 1e9,
    latency_us: Annotated[float, typer.Option(help="Its latency.")] = _INNER.latency_s * 1e6,
    node_gb_per_s: Annotated[float, typer.Option(help="Link of a device across nodes.")] = _OUTER.bytes_per_s / 1e9,
    node_latency_us: Annotated[float, typer.Option(help="Its latency.")] = _OUTER.latency_s * 1e6,
    dtype: Dtype = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Attention over one sequence on many devices: time, bytes, what is hidden; a model."""
    kernels = analysis.H200_KERNELS
    if tflops is not None:
        rates = ((1, tflops * 1e12, tflops * 1e12),)
        kernels = dataclasses.replace(kernels, name=f"{tflops:g} TFLOP/s", forward=rates, backward=rates)
    cluster = Cluster(Link(latency_us / 1e6, gb_per_s * 1e9), Link(node_latency_us / 1e6, node_gb_per_s * 1e9), node)
    rows, records = [], []
    for rows_each in integers(tokens, "--tokens"):
        for world in integers(gpus, "--gpus"):
            sizes = (rows_each, world, heads, heads_kv, head_dim, causal, window)
            shape = RingShape(*sizes, cast(Any, layout), cast(Any, scheme), ulysses, dtype, document)
            cost = analysis.ring_cost(shape, kernels, cluster, backward)
            times = map(_ms, (cost.kernels_s, cost.waiting_s, cost.total_s))
            rate, share = f"{cost.flops_per_s / 1e12:,.0f}", f"{cost.share:.3f}"
            even = f"{cost.of_least:.2f}", f"{cost.imbalance:.2f}"
            rows.append([f"{world:,}", f"{rows_each:,}", _gb(cost.sent_bytes), *even, *times, rate, share])
            records.append({**facts(shape), **facts(cost, "total_s", "share", "hidden", "flops_per_s")})
    caption = _CAPTION.format(
        name=kernels.name, inner=gb_per_s, inner_us=latency_us, node=node, outer=node_gb_per_s, outer_us=node_latency_us
    )
    columns = ["GPUs", "tokens", "GB sent", "of least", "fullest", "kernels", "waiting", "ms", "TFLOP/s", "share"]
    title = f"{'Backward' if backward else 'Forward'} over many devices, {layout}, {scheme}, {heads}/{heads_kv} heads"
    show(as_json, title, caption, columns, rows, records)
