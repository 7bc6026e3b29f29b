"""Models of what attention costs: memory, HBM traffic, arithmetic, roofline, tiles, decoding, a transformer, rings.

Plain integer arithmetic; every function states its formula, its convention and its source.
"""

from flashtile_lab.analysis.compute import (
    AttentionFlops,
    ExponentialCost,
    arithmetic_intensity,
    attention_flops,
    exponential_cost,
)
from flashtile_lab.analysis.decode import DecodeCost, DecodeShape, DecodeSplits, decode_cost, decode_splits
from flashtile_lab.analysis.links import Cluster, Link, fit_link
from flashtile_lab.analysis.memory import AttentionMemory, attention_memory
from flashtile_lab.analysis.ring import H200_CLUSTER, H200_KERNELS, KernelTable, RingCost, RingShape, ring_cost
from flashtile_lab.analysis.roofline import A100, DEVICES, H100, H200, Device, Roofline, find_device, roofline_point
from flashtile_lab.analysis.shape import DTYPE_BYTES, AttentionShape, Blocks, dtype_bytes
from flashtile_lab.analysis.tiles import (
    TILE_SIDES,
    PeakIntermediates,
    TileMemory,
    fitting_tiles,
    peak_intermediates,
    tile_memory,
)
from flashtile_lab.analysis.traffic import (
    LoopOrder,
    StandardTraffic,
    TiledTraffic,
    compulsory_traffic_bytes,
    standard_traffic,
    tiled_traffic,
)
from flashtile_lab.analysis.transformer import TransformerConfig, TransformerMemory, transformer_memory

__all__ = [
    "A100",
    "DEVICES",
    "DTYPE_BYTES",
    "H100",
    "H200",
    "H200_CLUSTER",
    "H200_KERNELS",
    "TILE_SIDES",
    "AttentionFlops",
    "AttentionMemory",
    "AttentionShape",
    "Blocks",
    "Cluster",
    "DecodeCost",
    "DecodeShape",
    "DecodeSplits",
    "Device",
    "ExponentialCost",
    "KernelTable",
    "Link",
    "LoopOrder",
    "PeakIntermediates",
    "RingCost",
    "RingShape",
    "Roofline",
    "StandardTraffic",
    "TileMemory",
    "TiledTraffic",
    "TransformerConfig",
    "TransformerMemory",
    "arithmetic_intensity",
    "attention_flops",
    "attention_memory",
    "compulsory_traffic_bytes",
    "decode_cost",
    "decode_splits",
    "dtype_bytes",
    "exponential_cost",
    "find_device",
    "fit_link",
    "fitting_tiles",
    "peak_intermediates",
    "ring_cost",
    "roofline_point",
    "standard_traffic",
    "tile_memory",
    "tiled_traffic",
    "transformer_memory",
]
