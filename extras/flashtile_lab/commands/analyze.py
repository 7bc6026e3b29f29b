"""`flashtile-lab analyze`: what attention costs, as tables or as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, ParamSpec

import typer

from flashtile.cli.options import AsJson, integers, positive_int
from flashtile.core.errors import InvalidInputError
from flashtile_lab import analysis
from flashtile_lab.analysis import AttentionShape, Blocks, Device, LoopOrder
from flashtile_lab.commands.fp8 import fp8
from flashtile_lab.commands.options import MAX_SIZE, Dtype, HeadDim, facts, show, units
from flashtile_lab.commands.ring import ring

app = typer.Typer(
    help="What attention costs: memory, traffic, FLOPs, roofline, tiles, decoding, rings, 8 bits.", no_args_is_help=True
)

P = ParamSpec("P")

_LENGTH = ["4096"]
_GROWING_LENGTHS = ["512,4096,16384"]
_CONTEXT_LENGTHS = ["4k,32k"]
_CACHE_LENGTHS = ["1k,4k,8k,32k,128k"]
_HEADS_KV = ["8"]


def _command(command: Callable[P, None]) -> Callable[P, None]:
    """Adds a command, and turns the models' errors into the command line's: one message and exit code 2."""

    @app.command()
    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except InvalidInputError as error:
            raise typer.BadParameter(str(error)) from None

    return wrapped


def _blocks(text: str) -> Blocks:
    sides = [positive_int(side, "--block") for side in text.lower().split("x")]
    if len(sides) > 2:
        raise typer.BadParameter(f"--block: {text!r} must be one side (128) or rows of Q by rows of K (128x64)")
    return Blocks(sides[0], sides[-1])


def _device(name: str, peak_tflops: float | None, bandwidth_tbps: float | None) -> Device:
    if peak_tflops is None and bandwidth_tbps is None:
        return analysis.find_device(name)
    if peak_tflops is None or bandwidth_tbps is None:
        raise typer.BadParameter("--peak-tflops and --bandwidth-tbps describe a device together; give both")
    return Device(f"{peak_tflops:g} TFLOP/s, {bandwidth_tbps:g} TB/s", peak_tflops * 1e12, bandwidth_tbps * 1e12)


_mb, _gb, _kib, _us = units(1e6, 2), units(1e9, 2), units(1024, 1), units(1e-6, 1)

Seqlens = Annotated[list[str], typer.Option(help="Lengths of Q and K; repeat it or use commas; 4k is 4096.")]
Heads = Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Query heads, each with its own keys and values.")]
Batch = Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Sequences in the batch.")]
Block = Annotated[str, typer.Option(help="Side of a tile, or rows of Q by rows of K: 128x64.")]
Causal = Annotated[bool, typer.Option("--causal", help="Key j is kept for query i when j <= i.")]
DeviceName = Annotated[str, typer.Option(help="A100, H100 or H200.")]
PeakTflops = Annotated[float | None, typer.Option(help="Peak of another device, with --bandwidth-tbps.")]
BandwidthTbps = Annotated[float | None, typer.Option(help="Memory bandwidth of another device, in 1e12 bytes/s.")]


def _shape(seqlen: int, head_dim: int, heads: int, batch: int, dtype: str, causal: bool = False) -> AttentionShape:
    return AttentionShape(seqlen, seqlen, head_dim, heads, batch, dtype, causal)


@_command
def memory(
    seqlen: Seqlens = _GROWING_LENGTHS,
    head_dim: HeadDim = 64,
    heads: Heads = 1,
    batch: Batch = 1,
    dtype: Dtype = "float16",
    block: Block = "64",
    as_json: AsJson = False,
) -> None:
    """Bytes that standard and tiled attention need beyond Q, K and V."""
    rows, records = [], []
    for n in integers(seqlen):
        result = analysis.attention_memory(_shape(n, head_dim, heads, batch, dtype), _blocks(block))
        rows.append([f"{n:,}", _mb(result.standard_bytes), _mb(result.tiled_bytes), f"{result.ratio:,.1f}x"])
        records.append({"seqlen": n, **facts(result, "standard_bytes", "tiled_bytes", "ratio")})
    caption = "MB = 1e6 bytes. Standard: the score matrix. Tiled: output, float32 log-sum-exp, tiles of Q, K, V and P."
    columns = ["seqlen", "standard MB", "tiled MB", "ratio"]
    show(as_json, f"Attention memory, {dtype}, head_dim {head_dim}", caption, columns, rows, records)


@_command
def traffic(
    seqlen: Seqlens = _LENGTH,
    head_dim: HeadDim = 64,
    heads: Heads = 1,
    batch: Batch = 1,
    dtype: Dtype = "float16",
    block: Block = "64",
    causal: Causal = False,
    as_json: AsJson = False,
) -> None:
    """HBM bytes of a forward: standard attention, and tiled attention under both loop orders."""
    rows, records = [], []
    for n in integers(seqlen):
        shape = _shape(n, head_dim, heads, batch, dtype, causal)
        standard = analysis.standard_traffic(shape)
        parts = [standard.inputs_read_bytes, standard.scores_probs_bytes, standard.out_write_bytes]
        parts += [standard.out_read_back_bytes, standard.total_bytes]
        rows.append(["standard", f"{n:,}", *map(_mb, parts), "-"])
        records.append({"seqlen": n, "method": "standard", **facts(standard, "own_bytes", "total_bytes")})
        for order in LoopOrder:
            tiled = analysis.tiled_traffic(shape, _blocks(block), order)
            parts = [tiled.inputs_read_bytes, tiled.state_read_bytes, tiled.write_bytes]
            rows.append([order, f"{n:,}", *map(_mb, parts), "-", _mb(tiled.total_bytes), f"{tiled.rescales:,}"])
            records.append({"seqlen": n, "method": "tiled", **facts(tiled, "total_bytes")})
    caption = (
        "MB = 1e6 bytes, no cache. Between: S and P written and read, or the carried output and statistics read again. "
        "Next: the next layer's read of the output, counted for standard alone. Rescales: divisions of an output block."
    )
    columns = ["MB", "seqlen", "in", "between", "out", "next", "total", "rescales"]
    show(as_json, f"HBM traffic, forward, {dtype}, head_dim {head_dim}", caption, columns, rows, records)


@_command
def flops(
    seqlen: Seqlens = _LENGTH,
    head_dim: HeadDim = 128,
    heads: Heads = 1,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    device: DeviceName = "H100",
    as_json: AsJson = False,
) -> None:
    """Matrix FLOPs and exponentials, and how the two balance on a device."""
    accelerator = analysis.find_device(device)
    rows, records = [], []
    for n in integers(seqlen):
        shape = _shape(n, head_dim, heads, batch, dtype, causal)
        result = analysis.attention_flops(shape)
        cost = analysis.exponential_cost(shape, accelerator) if accelerator.states_peak_for(dtype) else None
        intensity = analysis.arithmetic_intensity(result.forward_flops, analysis.compulsory_traffic_bytes(shape))
        gflops = [f"{value / 1e9:,.2f}" for value in (result.forward_flops, result.backward_flops)]
        exps = f"{result.forward_exps / 1e6:,.2f}"
        rows.append([f"{n:,}", *gflops, f"{intensity:,.1f}", exps, f"{cost.ratio:.2f}" if cost else "-"])
        records.append(
            {
                "seqlen": n,
                **facts(result, "total_flops"),
                "forward_intensity_flops_per_byte": intensity,
                "device": accelerator.name,
                "exponential_cost": facts(cost, "ratio") if cost else None,
            }
        )
    caption = (
        "A multiply-add is 2 FLOPs; kept scores alone count. Intensity: forward FLOPs over inputs read and outputs "
        f"written once. Last column: cycles of exponentials over cycles of products on {accelerator.name}, "
        "whose peak is stated for 16-bit elements (- for others)."
    )
    columns = ["seqlen", "fwd GFLOP", "bwd GFLOP", "FLOP/byte", "exps 1e6", "exp/product"]
    show(as_json, f"Arithmetic, head_dim {head_dim}", caption, columns, rows, records)


@_command
def roofline(
    seqlen: Seqlens = _LENGTH,
    head_dim: HeadDim = 128,
    heads: Heads = 16,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    block: Block = "128",
    causal: Causal = False,
    device: DeviceName = "H100",
    peak_tflops: PeakTflops = None,
    bandwidth_tbps: BandwidthTbps = None,
    as_json: AsJson = False,
) -> None:
    """How fast a forward can run: standard, tiled, and tiled with every byte moved once."""
    accelerator = _device(device, peak_tflops, bandwidth_tbps)
    accelerator.check_dtype(dtype)
    rows, records = [], []
    for n in integers(seqlen):
        shape = _shape(n, head_dim, heads, batch, dtype, causal)
        tiled = analysis.tiled_traffic(shape, _blocks(block), LoopOrder.Q_OUTSIDE)
        work = analysis.attention_flops(shape).forward_flops
        methods = {
            "standard": analysis.standard_traffic(shape).own_bytes,
            "tiled": tiled.total_bytes,
            "tiled, L2": analysis.compulsory_traffic_bytes(shape),
        }
        for method, hbm_bytes in methods.items():
            point = analysis.roofline_point(work, hbm_bytes, accelerator)
            rate, time_us = point.attainable_flops_per_s / 1e12, point.time_s * 1e6
            intensity = f"{point.intensity_flops_per_byte:,.1f}"
            rows.append([method, f"{n:,}", _mb(hbm_bytes), intensity, f"{rate:,.1f}", point.bound, f"{time_us:,.2f}"])
            names = {"seqlen": n, "device": accelerator.name, "method": method}
            records.append({**names, "forward_flops": work, "hbm_bytes": hbm_bytes, **asdict(point)})
    caption = (
        f"{accelerator.name}: attainable = min(peak, intensity x bandwidth); compute-bound from "
        f"{accelerator.ridge_flops_per_byte:,.0f} FLOP/byte. Exponentials are not counted. Tiled: K and V read "
        "again for every block of Q; with a perfect L2 cache each byte moves once."
    )
    columns = ["method", "seqlen", "MB", "FLOP/byte", "TFLOP/s", "bound", "time us"]
    show(as_json, f"Roofline, forward, {dtype}, head_dim {head_dim}", caption, columns, rows, records)


@_command
def tiles(
    head_dim: HeadDim = 64,
    dtype: Dtype = "float16",
    block: Annotated[str | None, typer.Option(help="Ask for this tile alone: 128, or 128x64.")] = None,
    device: DeviceName = "H100",
    on_chip_kb: Annotated[float | None, typer.Option(help="On-chip memory in KiB, instead of the device's.")] = None,
    as_json: AsJson = False,
) -> None:
    """On-chip memory of tiles, and which of them fit."""
    budget_bytes = on_chip_kb * 1024 if on_chip_kb is not None else analysis.find_device(device).on_chip_bytes
    if budget_bytes is None or not 0 < budget_bytes < float("inf"):
        raise typer.BadParameter(f"--on-chip-kb: must be a number greater than 0, got {on_chip_kb}")
    if block is not None:
        found = [analysis.tile_memory(_blocks(block), head_dim, dtype)]
    else:
        found = analysis.fitting_tiles(budget_bytes, head_dim, dtype)
    rows, records = [], []
    for tile in found:
        sides, fits = f"{tile.blocks.block_q}x{tile.blocks.block_k}", tile.total_bytes <= budget_bytes
        parts = [tile.q_bytes, tile.k_bytes + tile.v_bytes, tile.probs_bytes, tile.acc_bytes, tile.row_stats_bytes]
        rows.append([sides, *map(_kib, [*parts, tile.tiles_bytes, tile.total_bytes]), "yes" if fits else "no"])
        records.append({**facts(tile, "tiles_bytes", "total_bytes"), "budget_bytes": budget_bytes, "fits": fits})
    caption = (
        f"KiB = 1024 bytes, budget {_kib(budget_bytes)}. Tile: rows of Q x rows of K. Q, K, V, P in {dtype}; output "
        "accumulator and row statistics in float32 or wider; one stage. Fewest HBM bytes first."
    )
    caption += "" if found else " Nothing fits."
    columns = ["tile", "Q", "K + V", "P", "acc", "stats", "matrices", "total", "fits"]
    show(as_json, f"Tiles on chip, KiB, head_dim {head_dim}", caption, columns, rows, records)


@_command
def peak(
    seqlen: Seqlens = _LENGTH,
    head_dim: HeadDim = 64,
    block: Block = "128",
    as_json: AsJson = False,
) -> None:
    """The most numbers between inputs and output that are alive at once."""
    rows, records = [], []
    for n in integers(seqlen):
        result = analysis.peak_intermediates(AttentionShape(n, n, head_dim), _blocks(block))
        rows.append([f"{n:,}", f"{result.standard_numbers:,}", f"{result.tiled_numbers:,}", f"{result.ratio:,.1f}x"])
        records.append({"seqlen": n, **facts(result, "ratio")})
    caption = (
        "Numbers, for one head. Standard: the score matrix. Tiled: a tile of scores, its accumulator, max and sum."
    )
    columns = ["seqlen", "standard", "tiled", "ratio"]
    show(as_json, f"Peak intermediates, head_dim {head_dim}, tile {block}", caption, columns, rows, records)


@_command
def transformer(
    seqlen: Seqlens = _CONTEXT_LENGTHS,
    d_model: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Width of the model.")] = 4096,
    layers: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Number of layers.")] = 32,
    vocab: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Size of the vocabulary.")] = 32000,
    heads: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Query heads.")] = 32,
    heads_kv: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="Key-value heads; as many as --heads if left out.")
    ] = None,
    batch: Batch = 1,
    dtype: Dtype = "float16",
    as_json: AsJson = False,
) -> None:
    """A decoder transformer's memory at a context length, part by part."""
    config = analysis.TransformerConfig(d_model, layers, vocab, heads, heads_kv or heads, dtype=dtype)
    rows, records = [], []
    for n in integers(seqlen):
        result = analysis.transformer_memory(config, n, batch)
        parts = [result.embedding_bytes, result.attention_weights_bytes, result.mlp_weights_bytes]
        parts += [result.kv_cache_bytes, result.activations_bytes, result.total_bytes, result.scores_bytes_per_layer]
        rows.append([f"{n:,}", *map(_gb, parts)])
        records.append(facts(result, "weights_bytes", "total_bytes"))
    caption = (
        "GB = 1e9 bytes. Kept: block input, Q and attention output of every layer, enough to run attention backward. "
        "S a layer: what standard attention would add in each layer, not in the total."
    )
    columns = ["seqlen", "embedding", "attention", "MLP", "KV cache", "kept", "total", "S a layer"]
    title = f"Transformer memory, GB, {dtype}, d_model {d_model}, {layers} layers"
    show(as_json, title, caption, columns, rows, records)


@_command
def decode(
    seqlen: Annotated[list[str], typer.Option(help="Keys of a sequence; commas; 4k is 4096.")] = _CACHE_LENGTHS,
    head_dim: HeadDim = 128,
    heads: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Query heads.")] = 32,
    heads_kv: Annotated[list[str], typer.Option(help="Key-value heads; one count, or several by commas.")] = _HEADS_KV,
    batch: Batch = 1,
    seqlen_q: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Queries of a sequence.")] = 1,
    dtype: Dtype = "bfloat16",
    cache_dtype: Annotated[str | None, typer.Option(help="Of keys and values, if not --dtype; float8.")] = None,
    page_size: Annotated[int, typer.Option(min=0, max=MAX_SIZE, help="Keys a page; 0 is no pages.")] = 0,
    block: Block = "64x128",
    device: DeviceName = "H200",
    as_json: AsJson = False,
) -> None:
    """A decode step over a cache: bytes, shortest time, and whether splitting the keys pays."""
    accelerator = analysis.find_device(device)
    rows, records = [], []
    for kv_heads in integers(heads_kv, "--heads-kv"):
        for n in integers(seqlen):
            sizes = (n, heads, kv_heads, head_dim, batch, seqlen_q)
            shape = analysis.DecodeShape(*sizes, dtype, cache_dtype, page_size)
            cost = analysis.decode_cost(shape, accelerator)
            split = analysis.decode_splits(shape, accelerator, _blocks(block))
            point = cost.roofline
            cells = [f"{cost.kv_bytes / 1e6:,.1f}", f"{point.intensity_flops_per_byte:,.1f}", _us(point.time_s)]
            cells += [f"{split.programs:,}", _us(split.unsplit_s), f"{split.splits:,}", _us(split.split_s)]
            rows.append([f"{n:,}", str(shape.group_size), *cells])
            names = {"seqlen": n, "num_heads_kv": kv_heads, "group_size": shape.group_size, "device": accelerator.name}
            records.append({**names, **facts(cost, "total_bytes", "page_table_share"), **facts(split, "gain")})
    caption = (
        f"{accelerator.name}, {accelerator.hbm_bytes_per_s / 1e12:g} TB/s; MB = 1e6 bytes. Floor: each byte once. "
        f"Grid: programs, one for {block} rows by keys, sequence and key head; fewer than {accelerator.num_sms} "
        "multiprocessors leave memory idle, unless the keys are split. No split, split: bounds of a model, without "
        "launches."
    )
    if page_size:
        ids, spare = (max(one[name] for one in records) for name in ("page_table_share", "spare_bytes"))
        caption += f" Page ids add {ids:.2%} to the bytes; ends of last pages lose {_mb(spare)} MB on average."
    columns = ["keys", "group", "KV MB", "FLOP /byte", "floor us", "grid", "no split us", "splits", "split us"]
    show(as_json, f"Decode, {batch} x {seqlen_q} queries, head_dim {head_dim}", caption, columns, rows, records)


_command(ring)
_command(fp8)
