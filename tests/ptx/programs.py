"""Programs of a few instructions, by hand."""

from __future__ import annotations

import struct

import torch

from tests.ptx import access, arithmetic, barriers, moving, products
from tests.ptx.bulk import TensorMap
from tests.ptx.decode import PARAM_BASE, PARAM_STEP, Decoder
from tests.ptx.machine import Machine, Options
from tests.ptx.memory import GlobalMemory
from tests.ptx.text import parse

_USED = (access, arithmetic, barriers, moving, products)
_HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry test(.param .u64 .ptr .global .align 1 test_param_0, .param .u32 test_param_1,
                    .param .align 64 .b8 test_param_2[128])
.reqntid {threads}
{{
 .reg .pred %p<8>;
 .reg .b16 %rs<8>;
 .reg .b32 %r<32>;
 .reg .b64 %rd<8>;
 ld.param.b64 %rd1, [test_param_0];
 mov.u32 %r1, %tid.x;
 mul.wide.u32 %rd2, %r1, 4;
 add.s64 %rd3, %rd1, %rd2;
{body}
 ret;
}}
"""


def run(
    body: str,
    out: torch.Tensor,
    *,
    threads: int = 32,
    number: int = 0,
    seed: int = 0,
    blocks: int = 1,
    cluster: int = 1,
    tensor: TensorMap | None = None,
) -> Machine:
    """Runs a body on blocks with 1 KiB of shared memory; %rd3 is where each thread's number lies in ``out``.

    ``test_param_2`` is a tensor map, of part of ``out``.
    """
    memory = GlobalMemory()
    memory.add("out", out.data_ptr(), out.untyped_storage().nbytes())
    params = {
        "test_param_0": struct.pack("<Q", out.data_ptr()),
        "test_param_1": struct.pack("<i", number),
        PARAM_BASE + 2 * PARAM_STEP: tensor,
    }
    code = Decoder(parse(_HEAD.format(threads=threads, body=body)))
    machine = Machine(code, (blocks, 1, 1), params, memory, 1024, Options(seed=seed, limit=100_000), cluster)
    machine.run()
    return machine
