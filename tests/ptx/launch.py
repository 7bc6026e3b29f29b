"""Compiles a kernel as a launch on a device would, and runs the PTX that comes out."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import create_function_from_signature

from flashtile.backends.gpu.launch import Launch, TensorMap, lower, mapped, pointer, source_of, specialise
from tests.ptx import access, arithmetic, barriers, bulk, moving, products
from tests.ptx.decode import PARAM_BASE, PARAM_STEP, Decoder
from tests.ptx.machine import Machine, Options
from tests.ptx.memory import GlobalMemory
from tests.ptx.text import PtxError, parse

# Modules that only register what they decode.
_USED = (access, arithmetic, barriers, moving, products)
# Where to leave the text of a kernel that failed.
KEEP_AT = Path(os.environ["PTX_KEEP"]) if "PTX_KEEP" in os.environ else None
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
_PACKED = {"i8": "<b", "u8": "<B", "i1": "<b", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q",
           "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d"}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """A compiled kernel.

    Attributes:
        code: Its decoded PTX.
        signature: Type of each argument by name, ``"constexpr"`` for what the compiler has eaten.
        tensors: What the launcher needs to know of each tensor descriptor.
        shared_bytes: Shared memory of a block.
        ptx: The text.
    """

    code: Decoder
    signature: dict[str, str]
    tensors: list[dict[str, Any]]
    shared_bytes: int
    ptx: str


class Kernels:
    """Builds of kernels for one architecture, kept for the next launch."""

    def __init__(self, capability: int = 90) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self._backend = make_backend(self.target)
        self._binders: dict[int, Any] = {}
        self._builds: dict[object, Build] = {}

    def build(
        self, kernel: Any, arguments: Sequence[Any] | Mapping[str, Any], options: dict[str, Any]
    ) -> tuple[Build, list[Any]]:
        """The build that these arguments need, and its arguments in order.

        By name they are those of a ``Launch``, built as the library does; in order, Triton's own launcher decides.
        """
        if isinstance(arguments, Mapping):
            return self._build_launch(Launch(kernel, 1, arguments, options))
        binder = self._binders.get(id(kernel))
        if binder is None:
            binder = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[id(kernel)] = binder
        options = {"debug": False, **options}
        bound, specialization, left = binder(*arguments, **options)
        key = (id(kernel), str(specialization), str(left))
        if key not in self._builds:
            parsed, signature, constexprs, attributes = kernel._pack_args(
                self._backend, options, bound, specialization, left
            )
            source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attributes)
            self._builds[key] = self._decoded(source, signature, parsed.__dict__)
        return self._builds[key], list(bound.values())

    def _build_launch(self, given: Launch) -> tuple[Build, list[Any]]:
        values: list[Any] = []

        def described(_: str, value: Any, is_constant: bool) -> Any:
            if is_constant:
                return value
            values.append(value)
            if isinstance(value, torch.Tensor):
                return pointer(value, "")
            if not hasattr(value, "block_shape"):
                return value
            shape, layout = value.block_shape, getattr(value, "layout", None)
            return TensorMap(value.base.dtype, tuple(value.shape), tuple(value.strides), tuple(shape), layout)

        launch = given._replace(arguments=mapped(given, described))
        key = lower(launch)[0]
        if key not in self._builds:
            what = specialise(launch)
            source = source_of(launch.kernel, what, amd=False)
            self._builds[key] = self._decoded(source, what.signature, dict(launch.options))
        return self._builds[key], values

    def _decoded(self, source: Any, signature: dict[str, str], options: dict[str, Any]) -> Build:
        compiled = self._compile(source, options)
        metadata, text = compiled.metadata, compiled.asm["ptx"]
        if metadata.global_scratch_size:
            raise PtxError("a kernel with scratch memory")
        return Build(Decoder(parse(text)), signature, list(metadata.tensordesc_meta or []), metadata.shared, text)

    def _compile(self, source: ASTSource, options: dict[str, Any]) -> Any:
        """As far as PTX: without the assembler, and in Triton's cache under a key of its own."""
        key = {**get_cache_invalidating_env_vars(), "assembler": "none"}
        with mock.patch.object(type(self._backend), "make_cubin", lambda *_: b""):
            return compile(source, target=self.target, options=options, _env_vars=key)

    def launch(
        self,
        kernel: Any,
        grid: Sequence[int],
        arguments: Sequence[Any] | Mapping[str, Any],
        options: dict[str, Any],
        machine: Options,
        cluster: int = 1,
    ) -> Machine:
        """Compiles what is not yet compiled, and runs it to its end.

        Args:
            kernel: A ``@triton.jit`` or ``@gluon.jit`` function.
            grid: Blocks along each axis.
            arguments: As for a launch, in order or by name; tensors must be on the CPU.
            options: The compiler's.
            machine: How the machine behaves.
            cluster: Blocks of a cluster.
        """
        build, values = self.build(kernel, arguments, options)
        memory = GlobalMemory()
        params = _parameters(build, values, memory)
        whole = (*grid, 1, 1)
        blocks = whole[0], whole[1], whole[2]
        run = Machine(build.code, blocks, params, memory, build.shared_bytes, machine, cluster)
        try:
            run.run()
        except Exception:
            if KEEP_AT is not None:
                (KEEP_AT / f"{kernel.__name__}.ptx").write_text(build.ptx)
            raise
        return run


def edited(kernel: str, pattern: str, replacement: str, place: int = 0) -> Callable[..., tuple[Build, list[Any]]]:
    """A ``Kernels.build`` that replaces one match of a pattern in the PTX of a kernel."""
    original = Kernels.build

    def build(self: Kernels, function: Any, *rest: Any) -> tuple[Build, list[Any]]:
        made, values = original(self, function, *rest)
        if function.__name__ != kernel:
            return made, values
        found = list(re.finditer(pattern, made.ptx))[place]
        text = made.ptx[: found.start()] + found.expand(replacement) + made.ptx[found.end() :]
        return replace(made, code=Decoder(parse(text)), ptx=text), values

    return build


def _remember(memory: GlobalMemory, name: str, tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    memory.add(name, storage.data_ptr(), storage.nbytes())


def _parameters(build: Build, values: list[Any], memory: GlobalMemory) -> dict[Any, Any]:
    """The kernel's parameters as the launcher of Triton lays them out: by name, tensor maps by address."""
    flat: list[bytes | bulk.TensorMap] = []
    described = iter(build.tensors)
    for (name, kind), value in zip(build.signature.items(), values, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            _remember(memory, name, value.base)
            about = next(described, None)
            if about is None:
                # Without hardware for it, a descriptor is its parts, shape and strides once more behind them.
                flat.append(struct.pack("<Q", value.base.data_ptr()))
                flat += [struct.pack("<q", n) for n in (*value.shape, *value.strides)]
                flat.append(struct.pack("<b", value.padding == "nan"))
            else:
                flat.append(_tensor_map(value, about))
            flat += [struct.pack("<i", n) for n in value.shape]
            flat += [struct.pack("<q", n) for n in value.strides]
        elif kind.startswith("*"):
            if value is not None:
                _remember(memory, name, value)
            flat.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
        else:
            flat.append(struct.pack(_PACKED[kind], value))
    # Scratch memory of the program and of a profiler, of which there is none.
    flat += [bytes(8), bytes(8)]
    params = build.code.program.params
    if len(flat) != len(params):
        raise PtxError(f"the kernel has {len(params)} parameters, the launch {len(flat)}")
    given: dict[Any, Any] = {}
    for place, ((name, size), value) in enumerate(zip(params, flat, strict=True)):
        if isinstance(value, bulk.TensorMap):
            if size != 128:
                raise PtxError(f"{name} has {size} bytes, and is a tensor map")
            given[PARAM_BASE + PARAM_STEP * place] = value
        else:
            if size != len(value):
                raise PtxError(f"{name} has {size} bytes, not {len(value)}")
            given[name] = value
    return given


def _tensor_map(value: TensorDescriptor, about: dict[str, Any]) -> bulk.TensorMap:
    size = about["elem_size"]
    if value.padding != "zero" or about["fp4_padded"]:
        raise PtxError("padding")
    return bulk.TensorMap(
        address=value.base.data_ptr(),
        size=size,
        shape=tuple(value.shape),
        strides=tuple(n * size for n in value.strides),
        box=tuple(about["block_size"]),
        swizzle=_SWIZZLES[about["swizzle"]],
        float32=value.base.dtype == torch.float32,
    )
