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
from typing import Any

TENSOR_MAP_BYTES = 128
_PTX_SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
_FORMATS = {"i32": "i", "fp32": "f", "i64": "q", "fp64": "d"}
# Sizes of the parameters by format; M is a tensor map.
SIZES = {"M": TENSOR_MAP_BYTES, "Q": 8, "q": 8, "d": 8, "i": 4, "f": 4}
# CUtensorMapDataType by the name Triton gives a dtype.
_DATA_TYPES = {"fp8e4nv": 0, "u8": 0, "fp16": 6, "fp32": 7, "bf16": 9}
_L2_PROMOTION_128 = 2
# CUlaunchConfig: grid, block and shared memory, the stream, attributes (none).
_CONFIG = struct.Struct("<7I4xQQI4x")
STREAM_WORD = 4
_MOST_DIMENSIONS = 5
# CUstreamWaitValue_flags.
_WAIT_EQUAL = 1
_ONES = (1,) * _MOST_DIMENSIONS


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


@functools.cache
def library() -> Any:
    """The driver library with the functions in use, each taking 64-bit values as they are."""
    cuda = ctypes.CDLL("libcuda.so.1")
    # Where CUDA runs an int is passed as 64 bits too, and c_int takes ctypes five times as long. What cuLaunchKernelEx
    # takes is made by ``address``.
    cuda.cuTensorMapEncodeTiled.argtypes = (ctypes.c_void_p,) * 12
    for function in (
        cuda.cuStreamWriteValue32_v2, cuda.cuStreamWriteValue64_v2, cuda.cuStreamWaitValue32_v2, cuda.cuMemcpyAsync,
    ):  # fmt: skip
        function.argtypes = (ctypes.c_void_p,) * 4
    if status := cuda.cuInit(0):
        raise DriverError(f"cuInit: error {status}")
    return cuda


# What ctypes makes of an address at each call, made once: four take 0.14 us of a launch.
address = ctypes.c_void_p.from_param


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
    """An encoded tensor map; its first 8 bytes are the address.

    Args:
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp8e4nv"``, which it has as bytes.
        shape: Elements along each dimension, the contiguous one last.
        strides: In elements; the last is 1.
        box: Elements of one copy.
        swizzle: As the driver numbers its kinds.
        size: Bytes of an element.
        address: Address of the first element, 16-byte aligned.

    Raises:
        DriverError: If the driver refuses the shape or the strides.
    """
    # The map, then what it is made of, in memory that one call uses at a time, at a known address: to make
    # an array of ctypes for each argument takes longer than the rest.
    try:
        memory, at = _spare_maps.pop()
    except IndexError:
        memory, at = _aligned_memory(TENSOR_MAP_BYTES + 24 * _MOST_DIMENSIONS)
    rank, given = len(shape), at + TENSOR_MAP_BYTES
    _map_format(rank).pack_into(
        memory, TENSOR_MAP_BYTES, *shape[::-1], *[stride * size for stride in strides[-2::-1]], 0, *box[::-1],
        *_ONES[:rank],
    )  # fmt: skip
    status = library().cuTensorMapEncodeTiled(
        at, _DATA_TYPES[dtype], rank, address, given, given + 8 * rank, given + 16 * rank, given + 20 * rank, 0,
        swizzle, _L2_PROMOTION_128, 0,
    )  # fmt: skip
    found = bytes(memory[:TENSOR_MAP_BYTES])
    _spare_maps.append((memory, at))
    if status:
        check(status, f"cuTensorMapEncodeTiled of shape {shape}, strides {strides}")
    return found


_spare_maps: list[tuple[memoryview, int]] = []


@functools.cache
def _map_format(rank: int) -> struct.Struct:
    """Sizes and strides of each dimension in 64 bits, sides of the box and of its steps in 32."""
    return struct.Struct(f"<{2 * rank}Q{2 * rank}I")


def _aligned_memory(size: int) -> tuple[memoryview, int]:
    """New memory on 64 bytes, as tensor maps must be, and its address."""
    memory = bytearray(size + 64)
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    return memoryview(memory)[-base % 64 :][:size], base + -base % 64


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


def write_value(stream: int, address: int, value: int, bits: int = 32) -> None:
    """Has a stream write to memory that the GPU reaches, when all before it is done and visible there."""
    call = f"cuStreamWriteValue{bits}_v2"
    check(getattr(library(), call)(stream, address, value, None), call)


def wait_value(stream: int, address: int, value: int) -> None:
    """Has a stream wait until memory of its GPU holds 32 bits."""
    check(library().cuStreamWaitValue32_v2(stream, address, value, _WAIT_EQUAL), "cuStreamWaitValue32")


def copy(stream: int, to: int, source: int, size: int) -> None:
    """Has a stream copy bytes between memory that its GPU reaches."""
    check(library().cuMemcpyAsync(to, source, size, stream), "cuMemcpyAsync")


@functools.cache
def _cluster_attribute(size: int) -> tuple[memoryview, int]:
    """A CUlaunchAttribute, clusters of ``size`` programs, and its address."""
    memory, at = _aligned_memory(128)
    struct.pack_into("<I4xIII", memory, 0, 4, size, 1, 1)
    return memory, at


class BlockLayout:
    """The layout of the memory block that a launch passes to the driver.

    The configuration comes first, then the parameters, then the pointers to them. The first two are a launch's content,
    which is copied into a block; the pointers are the same for all contents.

    Attributes:
        formats: As ``layout`` says.
        words: For each argument, the 64-bit word that its address is written to.
        spare: Blocks that no launch uses now.
    """

    def __init__(self, signature: Mapping[str, str], threads: int, shared_bytes: int) -> None:
        self.formats = layout(signature)
        self._threads, self._shared_bytes = threads, shared_bytes
        end = _CONFIG.size
        self.words: dict[str, int] = {}
        self.spare: list[ArgBlock] = []
        self._offsets: list[int] = []
        packing = _CONFIG.format
        for name, codes in self.formats.items():
            for code in codes:
                padding = -end % (64 if code == "M" else 8)
                packing += f"{padding}x{TENSOR_MAP_BYTES}s" if code == "M" else f"{padding}x{code}"
                end += padding
                self._offsets.append(end)
                self.words.setdefault(name, end // 8)
                end += SIZES[code]
        self._content = struct.Struct(f"{packing}{-end % 8}x")

    def content(self, programs: int, values: Sequence[Any], cluster: int = 1) -> bytes:
        """A launch's content: these parameters, tensor maps as bytes; addresses are still to be written."""
        attributes = (0, 0) if cluster == 1 else (_cluster_attribute(cluster)[1], 1)
        return self._content.pack(programs, 1, 1, self._threads, 1, 1, self._shared_bytes, 0, *attributes, *values)

    def block(self) -> ArgBlock:
        """A new block, without content."""
        size, count = self._content.size, len(self._offsets)
        view, base = _aligned_memory(size + 8 * count)
        struct.pack_into(f"<{count}Q", view, size, *[base + offset for offset in self._offsets])
        return ArgBlock(view[:size].cast("Q"), view[:size], address(base), address(base + size))


class ArgBlock:
    """The memory block that one launch passes to the driver.

    Attributes:
        words: The content's memory as 64-bit words; addresses and the stream are written here before a launch.
        memory: The same memory, as bytes.
        config: ``address`` of the CUlaunchConfig.
        pointers: ``address`` of the array of pointers to the parameters.
        content: What was copied into it last.
    """

    __slots__ = ("config", "content", "memory", "pointers", "words")

    def __init__(self, words: memoryview, memory: memoryview, config: Any, pointers: Any) -> None:
        self.words, self.memory, self.config, self.pointers = words, memory, config, pointers
        self.content: bytes | None = None
