"""What a launch writes for the driver: the configuration and every parameter, read back where the driver would look."""

from __future__ import annotations

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from flashtile.backends.gpu import driver, host, launch
from flashtile.backends.gpu.host import Step
from flashtile.backends.gpu.launch import Launch, Pointer, TensorMap


@triton.jit(do_not_specialize=["rows"])
def scaled_copy(x_source, x_ptr, out_ptr, flag_ptr, rows, stride, scale, BLOCK: tl.constexpr):
    """Uses every argument, so that none is dropped."""
    at = tl.arange(0, BLOCK)
    tile = x_source.load([0, 0])
    x = tl.load(x_ptr + at * stride, mask=at < rows, other=0.0)
    tl.store(out_ptr + at, x * scale + tl.sum(tile.to(tl.float32), 1)[:, None].sum(0))


class Driver:
    """Stands for the driver library: reads what it is given, and keeps it."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.status = 0

    def cuTensorMapEncodeTiled(self, at: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        lengths = (8 * rank, 8 * rank - 8, 4 * rank, 4 * rank)
        given = b"".join(ctypes.string_at(place, size) for place, size in zip(rest[:4], lengths, strict=True))
        text = struct.pack("<QII", address, dtype, rank) + given
        ctypes.memmove(at, text.ljust(driver.TENSOR_MAP_BYTES, b"\xee"), driver.TENSOR_MAP_BYTES)
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: None) -> int:
        *sizes, stream, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        places = struct.unpack(f"<{len(self.sizes)}Q", ctypes.string_at(pointers, 8 * len(self.sizes)))
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        self.launched.append({"sizes": sizes, "stream": stream, "attributes": (attributes, count),
                              "function": function, "values": values, "places": places})  # fmt: skip
        return self.status

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_THE_TEST"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(driver, "ensure_context", lambda device: None)
    monkeypatch.setattr(host, "launcher", lambda: "driver")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x1234_5678_9ABC, raising=False)

    def load(made_of: Launch, what: launch.Specialisation, device: int) -> Any:
        compiled = launch.compile_kernel(made_of.kernel, what, made_of.options, GPUTarget("cuda", 90, 32))
        made.sizes = driver.parameter_sizes(compiled.asm["ptx"])
        return SimpleNamespace(metadata=compiled.metadata, asm=compiled.asm, function=77)

    monkeypatch.setattr(host, "load", load)
    driver.tensor_map.cache_clear()
    monkeypatch.setattr(host, "_builds", {})
    return made


def _launch(x: torch.Tensor, rows: int = 17) -> Launch:
    arguments = {
        "x_source": TensorMap(x.dtype, tuple(x.shape), x.stride(), (64, 64)),
        "x_ptr": x,
        "out_ptr": Pointer(torch.float32),
        "flag_ptr": None,
        "rows": rows,
        "stride": x.stride(0),
        "scale": 0.25,
        "BLOCK": 64,
    }
    return Launch(scaled_copy, 5, arguments, {"num_warps": 8})


def test_the_driver_finds_every_parameter_where_the_kernel_wants_it(fake: Driver) -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    step = Step(_launch(x), ("out", "x", "flag"), torch.device("cuda", 0))
    assert step._spare is step._build.layout.spare
    out = torch.zeros(64)
    host.run([step], (out, x, None))
    (seen,) = fake.launched
    assert seen["sizes"][:3] == [5, 1, 1] and seen["sizes"][3] == 256 and seen["sizes"][4:6] == [1, 1]
    assert (seen["stream"], seen["attributes"], seen["function"]) == (0x1234_5678_9ABC, (0, 0), 77)
    values = seen["values"]
    assert values[0][:8] == struct.pack("<Q", x.data_ptr()) and values[0][12:16] == struct.pack("<I", 2)
    assert seen["places"][0] % 64 == 0
    assert values[1:5] == [struct.pack("<i", 64)] * 2 + [struct.pack("<q", 64), struct.pack("<q", 1)]
    numbers = [struct.pack("<QQ", x.data_ptr(), out.data_ptr()), struct.pack("<iif", 17, 64, 0.25), bytes(16)]
    assert b"".join(values[5:]) == b"".join(numbers)


def test_other_memory_and_other_threads_blocks(fake: Driver) -> None:
    x, y = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2))
    out = torch.zeros(64)
    step = Step(_launch(x), ("out", "x", "flag"), torch.device("cuda", 0))
    spare = step._spare.pop() if step._spare else step._build.layout.block()
    host.run([step], (out, y, None))
    step._spare.append(spare)
    host.run([step], (out, x, None))
    addresses = [struct.unpack("<Q", seen["values"][0][:8])[0] for seen in fake.launched]
    assert addresses == [y.data_ptr(), x.data_ptr()]
    assert fake.launched[0]["values"][5:] != fake.launched[1]["values"][5:]


def test_lengths_need_no_build_and_dtypes_do(fake: Driver) -> None:
    device = torch.device("cuda", 0)
    for rows in (17, 18, 1, 16, 4096):
        Step(_launch(torch.zeros(64 + rows, 64, dtype=torch.bfloat16), rows), ("out", "x", "flag"), device)
    assert len(host._builds) == 1
    Step(_launch(torch.zeros(64, 64, dtype=torch.float16)), ("out", "x", "flag"), device)
    assert len(host._builds) == 2


def _sized(rows: int, stride: int = 64, offset: int = 0) -> Launch:
    """A launch whose sizes are those that ``_launch`` has no fixed value for."""
    # A view of one row: a stride of 2^32 elements needs no memory.
    x = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 64), (stride, 1))
    whole = _launch(x, rows).arguments
    out = Pointer(torch.float32, "out", offset)
    source = TensorMap(x.dtype, (min(rows, 2**20), 64), (stride, 1), (64, 64))
    sizes = {"x_source": source, "rows": rows, "stride": stride, "flag_ptr": None, "out_ptr": out}
    others = {name: value for name, value in whole.items() if name not in sizes}
    return Launch(scaled_copy, 5 + rows % 7, sizes, {"num_warps": 8}, lambda: others, 64)


def test_a_step_like_another_lays_out_what_a_new_one_would(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    device, operands, known = torch.device("cuda", 0), ("out", "x", "flag"), {}
    made: list[Launch] = []
    find_build = host.find_build
    monkeypatch.setattr(host, "find_build", lambda launch, device: (made.append(launch), find_build(launch, device))[1])
    sizes = [(n, 64, 16 * (n % 3)) for n in (17, 18, 1, 16, 4096, 2**31, 2**32)] + [(9, 72, 0), (10, 2**32, 0)]
    for rows, stride, offset in sizes * 2:
        launch_ = _sized(rows, stride, offset)
        step = Step(launch_, operands, device, known)
        fresh = Step(launch_, operands, device)
        assert (step._content, sorted(step._addresses)) == (fresh._content, sorted(fresh._addresses))
        assert step._build is fresh._build and made.pop() is launch_
    # Each of: lengths of 32 bits; of 64 bits; a stride that is no multiple of 16, and one of 64 bits.
    assert len(known) == len(made) == 4 and len(host._builds) == 4


def test_steps_of_other_lengths_in_other_threads(fake: Driver) -> None:
    """They share blocks: what the driver reads is of one step, whole."""
    device, operands, known, at_once = torch.device("cuda", 0), ("out", "x", "flag"), {}, 4
    steps = [Step(_sized(rows), operands, device, known) for rows in range(100, 100 + at_once)]
    tensors = [(torch.zeros(64), torch.zeros(64, 64, dtype=torch.bfloat16), None) for _ in steps]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda n: host.run([steps[n % at_once]], tensors[n % at_once]), range(400)))
    assert len(known) == 1 and len(fake.launched) == 400 and len(steps[0]._build.layout.spare) <= at_once
    for n, (step, (out, x, _)) in enumerate(zip(steps, tensors, strict=True)):
        mine = [seen for seen in fake.launched if seen["values"][7] == struct.pack("<i", 100 + n)]
        assert len(mine) == 100
        for seen in mine:
            addresses = seen["values"][0][:8] + seen["values"][5] + seen["values"][6]
            assert addresses == struct.pack("<QQQ", x.data_ptr(), x.data_ptr(), out.data_ptr())
            assert seen["sizes"][0] == step.programs and seen["values"][1] == struct.pack("<i", 100 + n)


def test_a_refusal_of_the_driver_has_its_name(fake: Driver) -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    step = Step(_launch(x), ("out", "x", "flag"), torch.device("cuda", 0))
    fake.status = 700
    with pytest.raises(driver.DriverError, match=r"launch of scaled_copy: CUDA_ERROR_OF_THE_TEST \(700\)"):
        host.run([step], (torch.zeros(64), x, None))


def test_an_unknown_kernel_interface_is_left_to_triton(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "layout", lambda signature: {"x": "Q"})
    seen: list[Any] = []
    monkeypatch.setattr(host, "launch_by_triton", lambda *arguments: seen.append(arguments))
    x, out = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64)
    host.run([Step(_launch(x), ("out", "x", "flag"), torch.device("cuda", 0))], (out, x, None))
    ((kernel, programs, arguments, options),) = seen
    assert (kernel, programs, options) == (scaled_copy, 5, {"num_warps": 8})
    assert arguments["x_ptr"] is x and arguments["out_ptr"] is out and arguments["rows"] == 17
    assert arguments["x_source"].base is x and fake.launched == []


def test_parameter_sizes_are_read_from_the_program() -> None:
    text = """.visible .entry f(
    .param .align 64 .b8 f_param_0[128],
    .param .u32 f_param_1,
    .param .u64 .ptr .global .align 1 f_param_2,
    .param .f32 f_param_3
)
.reqntid 128"""
    assert driver.parameter_sizes(text) == [128, 4, 8, 4]


def test_scratch_memory_is_left_to_triton() -> None:
    about = SimpleNamespace(tensordesc_meta=[], global_scratch_size=128, profile_scratch_size=0, num_ctas=1,
                            launch_cooperative_grid=False, launch_pdl=False)  # fmt: skip
    what = launch.Specialisation({"x_ptr": "*fp32"}, {}, ())
    assert host.why_unknown(what, SimpleNamespace(metadata=about, asm={})) == "it needs scratch memory"
