"""Runs the PTX that Triton's compiler makes of the kernels, on a CPU: layouts, swizzles, barriers, predicates.

``tests.emulator`` runs the kernels' source; this runs what the compiler made of it, instruction by instruction, 32
lanes at a time. It is functional only: no time, no registers running out, no assembler. Warps take turns in an order
drawn from a seed; TMA copies complete at some moment before they are waited for, matrix products at the wait (or, by
option, at their issue). What it does not know it raises, with the line. README.md says how to use it and how to read
its errors. It finds, besides wrong numbers,

- races between warps and copies in shared and global memory, where atomics order by their semantics and scope,
- missing proxy fences and ``wgmma.fence``, deadlocks,
- accumulators used before the wait, warps that end with copies or products in flight,
- accesses outside tensors, shared memory and boxes, misaligned ones, reads of shared memory that nobody wrote,
- memory of an mbarrier that is used otherwise before it is invalidated, boxes whose coordinates 32 bits do not hold,
- register budgets (``setmaxnreg``) that can never be met, barriers and products with lanes apart.

It does not find what the assembler does (spills, its own errors), or races between the lanes of one warp.
"""

from __future__ import annotations
