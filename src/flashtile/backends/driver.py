"""Calls of the CUDA driver, and the parameter layout of Triton's kernels.

A Triton kernel for NVIDIA GPUs has one parameter per run-time argument, in order: a pointer or i64 of 8 bytes, an i32
or fp32 of 4, and for a tensor descriptor a tensor map of 128 bytes followed by its shape (i32 each) and strides (i64
each). Two pointers to scratch memory come last. ``layout`` predicts this, and ``parameter_sizes`` reads the actual
parameters from the compiled PTX; ``host`` launches without Triton only where both agree.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TENSOR_MAP_BYTES = 128
_PTX_SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
_FORMATS = {"i32": "i", "fp32": "f", "i64": "q"}
# Sizes of the parameters by format; M is a tensor map.
SIZES = {"M": TENSOR_MAP_BYTES, "Q": 8, "q": 8, "i": 4, "f": 4}
# CUtensorMapDataType by the name Triton gives a dtype.
_DATA_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}
_L2_PROMOTION_128 = 2
# CUlaunchConfig: grid, block and shared memory, the stream, attributes (none).
_CONFIG = struct.Struct("<7I4xQQI4x")
STREAM_WORD = 4
_MapBuffer = ctypes.c_char * (TENSOR_MAP_BYTES + 64)


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


@functools.cache
def library() -> Any:
    """The driver library with the two functions in use, each taking 64-bit values as they are."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    cuda.cuTensorMapEncodeTiled.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *(ctypes.c_void_p,) * 4, *(ctypes.c_int,) * 4
    )  # fmt: skip
    if status := cuda.cuInit(0):
        raise DriverError(f"cuInit: error {status}")
    return cuda


def check(status: int, call: str) -> None:
    """Raises DriverError for a status other than success, with the driver's name for it."""
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(text))
        name = (text.value or b"unknown error").decode()
        raise DriverError(f"{call}: {name} ({status})")


def layout(signature: Mapping[str, str]) -> dict[str, str]:
    """The parameters that each run-time argument becomes, as ``struct`` formats, scratch memory last.

    Raises:
        KeyError: For a type that no kernel of this library has.
    """
    formats: dict[str, str] = {}
    for name, kind in signature.items():
        if kind.startswith("*"):
            formats[name] = "Q"
        elif kind.startswith("tensordesc"):
            rank = _rank(kind)
            formats[name] = "M" + rank * "i" + rank * "q"
        else:
            formats[name] = _FORMATS[kind]
    return formats | {"global_scratch": "Q", "profile_scratch": "Q"}


def _rank(kind: str) -> int:
    """Dimensions of ``tensordesc<bf16[64, 128],...>``."""
    shape = kind[kind.index("[") + 1 : kind.index("]")]
    return shape.count(",") + 1


def parameter_sizes(ptx: str) -> list[int]:
    """Sizes in bytes of the parameters of a PTX program's kernel, in order."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise ValueError("the program has no kernel")
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\n]*?\w+(?:\[(\d+)\])?\s*(?:,|$)", entry[1], re.M)
    return [_PTX_SIZES[kind] * int(count or 1) for kind, count in found]


@functools.lru_cache(maxsize=4096)
def tensor_map(
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    size: int,
    address: int = 1 << 32,
) -> bytes:
    """An encoded tensor map, whose first 8 bytes are the address.

    Args:
        dtype: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        shape: Elements along each dimension, the contiguous one last.
        strides: In elements; the last is 1.
        box: Elements of one copy.
        swizzle: As the driver numbers its kinds.
        size: Bytes of an element.
        address: Of the first element, 16-byte aligned.

    Raises:
        DriverError: If the driver refuses the shape or the strides.
    """
    rank = len(shape)
    buffer = _MapBuffer()
    start = -ctypes.addressof(buffer) % 64
    # Bytes are passed as pointers to them, which takes less time than arrays of ctypes do to make.
    status = library().cuTensorMapEncodeTiled(
        ctypes.addressof(buffer) + start, _DATA_TYPES[dtype], rank, address, struct.pack(f"<{rank}Q", *shape[::-1]),
        struct.pack(f"<{rank - 1}Q", *[stride * size for stride in strides[-2::-1]]),
        struct.pack(f"<{rank}I", *box[::-1]), struct.pack(f"<{rank}I", *[1] * rank), 0, swizzle, _L2_PROMOTION_128, 0,
    )  # fmt: skip
    check(status, f"cuTensorMapEncodeTiled of shape {shape}, strides {strides}")
    return buffer.raw[start : start + TENSOR_MAP_BYTES]


def ensure_context(device: int) -> None:
    """Gives this thread a CUDA context if it has none: PyTorch makes one when a thread first uses a device."""
    cuda, context = library(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context:
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")


@functools.cache
def address_comes_first() -> bool:
    """Whether a tensor map is its address, in its first 8 bytes, and nothing else of it depends on the address.

    Writing those bytes then moves a map to other memory. Checked with two addresses of different bit patterns.
    """
    first, second = 0x7F0123456780, 0x00FEDCBA9870
    maps = [tensor_map("bf16", (640, 128), (128, 1), (64, 64), 3, 2, address) for address in (first, second)]
    return [each[:8] for each in maps] == [struct.pack("<Q", each) for each in (first, second)] and (
        maps[0][8:] == maps[1][8:]
    )


class BlockLayout:
    """The layout of the memory block that a launch passes to the driver.

    The configuration comes first, then the pointers to the parameters, then the parameters.

    Attributes:
        words: For each argument, the 64-bit word that its address is written to.
    """

    def __init__(self, signature: Mapping[str, str], threads: int, shared_bytes: int) -> None:
        formats = layout(signature)
        count = sum(map(len, formats.values()))
        self._threads, self._shared_bytes = threads, shared_bytes
        end = _CONFIG.size + 8 * count
        self._start = end = end + -end % 64
        self.words: dict[str, int] = {}
        self._offsets: list[int] = []
        packing = "<"
        for name, codes in formats.items():
            for code in codes:
                padding = -end % (64 if code == "M" else 8)
                packing += f"{padding}x{TENSOR_MAP_BYTES}s" if code == "M" else f"{padding}x{code}"
                end += padding
                self._offsets.append(end)
                self.words.setdefault(name, end // 8)
                end += SIZES[code]
        self._parameters = struct.Struct(packing)
        self._pointers = struct.Struct(f"<{count}Q")
        self._size = end + -end % 8

    def block(self, programs: int, values: Sequence[Any]) -> Block:
        """A block of these parameters, tensor maps as bytes; addresses are still to be written."""
        memory = bytearray(self._size + 64)
        base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        view = memoryview(memory)[-base % 64 :][: self._size]
        base += -base % 64
        _CONFIG.pack_into(view, 0, programs, 1, 1, self._threads, 1, 1, self._shared_bytes, 0, 0, 0)
        self._pointers.pack_into(view, _CONFIG.size, *[base + offset for offset in self._offsets])
        self._parameters.pack_into(view, self._start, *values)
        return Block(view.cast("Q"), base, base + _CONFIG.size)


class Block(NamedTuple):
    """The memory block that one launch passes to the driver.

    Attributes:
        words: The memory as 64-bit words; addresses and the stream are written here before a launch.
        config: Address of the CUlaunchConfig.
        pointers: Address of the array of pointers to the parameters.
    """

    words: memoryview
    config: int
    pointers: int
