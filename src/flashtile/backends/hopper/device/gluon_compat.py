"""One name each for Gluon's names that differ between Triton releases (3.6.0, 3.7.1 and 3.9.0 are tried)."""

from typing import TypeVar, dataclass_transform

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language import core

T = TypeVar("T")

# These were renamed after 3.7; the old names raise in 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
arrive_after_copies = async_copy.mbarrier_arrive
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# Public from 3.9 on; earlier releases have the operation without a name.
if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Adds a tile in shared memory to global memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@dataclass_transform()
def aggregate(cls: type[T]) -> type[T]:
    """Makes a class with annotated fields a value in device code, constructed from its fields in order."""
    # Public from 3.9 on, with such a constructor.
    if hasattr(triton, "aggregate"):
        return triton.aggregate(cls)

    def fill(self, *values):
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else gl.constexpr(value))

    fill.__triton_builtin__ = True  # type: ignore[attr-defined]
    if "__init__" not in vars(cls):
        cls.__init__ = fill  # type: ignore[method-assign, assignment, misc]
    return core._aggregate(cls)


@gluon.jit
def tma_put(desc, at, box, ADDS: gl.constexpr):
    """Stores a tile in shared memory to global memory, or ADDS it."""
    if ADDS:
        tma_add(desc, at, box)
    else:
        tma_store(desc, at, box)


# Public from 3.9 on, and renamed.
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def seen_as(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The first bytes of a buffer as another tensor."""
        return buffer.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def seen_as(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The first bytes of a buffer as another tensor."""
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def as_box(buffer, desc):
    """A two-dimensional tile in the shape of a descriptor's box, with 1 for the other dimensions."""
    shape: gl.constexpr = desc.block_type.shape
    layout: gl.constexpr = desc.layout
    return seen_as(buffer, desc.dtype, shape, layout)


@gluon.jit
def as_tile(buffer, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """Reinterprets a two-dimensional tile as another dtype with the same rows and no more bytes."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([buffer.shape[0], WIDTH], dtype)
    shape: gl.constexpr = [buffer.shape[0], WIDTH]
    return seen_as(buffer, dtype, shape, layout)


@gluon.jit
def as_row(buffer, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """The first bytes of a tile as [1, WIDTH], one after the other."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shape: gl.constexpr = [1, WIDTH]
    return seen_as(buffer, dtype, shape, layout)
