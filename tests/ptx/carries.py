"""Variables that a kernel's loop assigns and Triton's front end does not carry from one pass to the next.

The front end visits a loop's body once and compares each variable's IR value before and after (``_find_carries``).
Where ``held = block`` stands before the loop, and again in the body before ``block`` changes, both are the same value:
``held`` is taken for one that never changes, and every pass sees the first block. Python, and so an emulator of the
source, does what was meant.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import code_generator, make_backend

from flashtile.backends.gpu.launch import source_of
from flashtile.call.problem import gpu_of
from flashtile_lab.kernels.build import KernelBuild

Place = tuple[str, int, str, tuple[str, ...]]


def not_carried(build: KernelBuild, arch: str) -> set[Place]:
    """(file, line of the loop, variable, variables of the same value before it) of what looks like this mistake.

    A variable that every pass assigns its own old value is not looked for: it has no other name.

    Args:
        build: A kernel in one configuration; only its front end runs.
        arch: A key of ``ARCHS``.
    """
    gpu = GPUTarget(*dataclasses.astuple(gpu_of(arch)))
    backend = make_backend(gpu)
    source = source_of(build.kernel, dataclasses.replace(build.what, divisible=()), amd=False)
    options = backend.parse_options(dict(build.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with _watched() as found:
        generators = backend.get_codegen_implementation(options)
        source.make_ir(gpu, options, generators, backend.get_module_map(), context)
    return found


@contextmanager
def _watched() -> Iterator[set[Place]]:
    found: set[Place] = set()
    original = code_generator.CodeGenerator._find_carries

    def find(self: Any, node: Any, liveins: dict[str, Any], ignore: Any = frozenset()) -> Any:
        result = original(self, node, liveins, set(ignore))
        for name in _assigned(node.body) & set(liveins) - set(result[0]) - set(ignore):
            others = _same_value(name, liveins)
            if others:
                file = self.file_name.rsplit("/", 1)[-1]
                found.add((file, self.begin_line + node.lineno - 1, name, others))
        return result

    with mock.patch.object(code_generator.CodeGenerator, "_find_carries", find):
        yield found


def _assigned(body: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _same_value(name: str, liveins: dict[str, Any]) -> tuple[str, ...]:
    def handles(value: Any) -> Any:
        is_value = code_generator._is_triton_value(value)
        return code_generator.flatten_values_to_ir([value]) if is_value else None

    mine = handles(liveins[name])
    if not mine:
        return ()
    return tuple(sorted(other for other, value in liveins.items() if other != name and handles(value) == mine))
