"""What a launch writes for the driver: the configuration and every parameter, read back where the driver would look."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from flashtile.backends.gpu import build, driver, host, launch
from flashtile.backends.gpu.host import Launcher
from flashtile.backends.gpu.launch import Captured, Const, Launch, Pointer, TensorMap, pointer
from flashtile.backends.gpu.plan import Plan, empty
from tests.poison import poisoned_memory


class Matrix(NamedTuple):
    """A record with a leaf of every kind but a number of 16 bits."""

    desc: Any
    ptr: Any
    rows: Any
    stride_row: Any
    flag: Any
    BLOCK: Any


class Copy(NamedTuple):
    x: Any
    scales: Any
    function: Any


@triton.jit
def doubled(x, scales):
    return x * 2.0 * scales[0]


@triton.jit
def scaled_copy(copy, out_ptr, SUM: tl.constexpr):
    """Uses every leaf, so that none is dropped."""
    at = tl.arange(0, copy.x.BLOCK)
    tile = copy.x.desc.load([0, 0])
    x = tl.load(copy.x.ptr + at * copy.x.stride_row, mask=at < copy.x.rows, other=0.0)
    if SUM:
        x = copy.function(x, copy.scales) + tl.sum(tile.to(tl.float32), 1)[:, None].sum(0)
    if copy.x.flag is None:
        tl.store(out_ptr + at, x)


class Compiled:
    """Stands for Triton's compiled kernel, loaded; keeps what Triton is asked to launch."""

    def __init__(self, compiled: Any, driver: Driver) -> None:
        self.metadata, self.asm, self.function, self._driver = compiled.metadata, compiled.asm, 77, driver

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *leaves, stream: self._driver.by_triton.append((grid, leaves, stream))


def _number(address: Any) -> int | None:
    """What ctypes passes for an ``address``."""
    return ctypes.cast(address, ctypes.c_void_p).value


class Driver:
    """Stands for the driver library: reads what it is given, and keeps it."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.by_triton: list[Any] = []
        self.sizes: list[int] = []
        self.status = 0

    def cuTensorMapEncodeTiled(self, at: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        lengths = (8 * rank, 8 * rank - 8, 4 * rank, 4 * rank)
        given = b"".join(ctypes.string_at(place, size) for place, size in zip(rest[:4], lengths, strict=True))
        text = struct.pack("<QII", address, dtype, rank) + given
        ctypes.memmove(at, text.ljust(driver.TENSOR_MAP_BYTES, b"\xee"), driver.TENSOR_MAP_BYTES)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        *sizes, stream, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        places = struct.unpack(f"<{len(self.sizes)}Q", ctypes.string_at(pointers, 8 * len(self.sizes)))
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        self.launched.append({"sizes": sizes, "stream": stream, "attributes": (attributes, count),
                              "function": _number(function), "values": values, "places": places})  # fmt: skip
        return self.status

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_THE_TEST"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(driver, "ensure_context", lambda device: None)
    monkeypatch.setattr(build, "launcher", lambda: "driver")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x1234_5678_9ABC, raising=False)

    def load(made_of: Launch, what: launch.Specialisation, device: int) -> Any:
        compiled = launch.compile_kernel(made_of.kernel, what, made_of.options, GPUTarget("cuda", 90, 32))
        made.sizes = driver.parameter_sizes(compiled.asm["ptx"])
        return Compiled(compiled, made)

    monkeypatch.setattr(build, "load", load)
    driver.tensor_map.cache_clear()
    monkeypatch.setattr(build, "_builds", {})
    return made


def _launch(x: torch.Tensor, rows: Any = 17, stride: int = 0, offset: int = 0) -> Launch:
    source = TensorMap(x.dtype, tuple(x.shape), x.stride(), (64, 64), None, "x")
    matrix = Matrix(source, pointer(x, "x"), rows, stride or x.stride(0), None, 64)
    copy = Copy(matrix, (0.25, Const(3)), doubled)
    arguments = {"copy": copy, "out_ptr": Pointer(torch.float32, "out", offset), "SUM": True}
    return Launch(scaled_copy, 5 + offset // 16, arguments, {"num_warps": 8})


class Given(NamedTuple):
    """A call's record of tensors."""

    x: Any
    numbers: Any = (1.5, 2**40 + 7)
    tensors: Any = ()
    out: Any = None  # what a plan makes comes first


def _none() -> Launch:
    """A launch of no programs."""
    return _launch(torch.zeros(64, 64, dtype=torch.bfloat16))._replace(programs=0)


def _launcher(made_of: Launch) -> Launcher:
    return Launcher(made_of, torch.device("cuda", 0), Given(torch.zeros(1)), {"out": torch.zeros(1)})


def test_the_driver_finds_every_parameter_where_the_kernel_wants_it(fake: Driver) -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    out = torch.zeros(64)
    launcher = _launcher(_launch(x))
    assert launcher._spare is launcher._build.layout.spare
    host.run([launcher], Given(x), {"out": out})
    (seen,) = fake.launched
    assert seen["sizes"][:3] == [5, 1, 1] and seen["sizes"][3] == 256 and seen["sizes"][4:6] == [1, 1]
    assert (seen["stream"], seen["attributes"], seen["function"]) == (0x1234_5678_9ABC, (0, 0), 77)
    values = seen["values"]
    assert values[0][:8] == struct.pack("<Q", x.data_ptr()) and values[0][12:16] == struct.pack("<I", 2)
    assert seen["places"][0] % 64 == 0
    assert values[1:5] == [struct.pack("<i", 64)] * 2 + [struct.pack("<q", 64), struct.pack("<q", 1)]
    numbers = [struct.pack("<Qiif", x.data_ptr(), 17, 64, 0.25), struct.pack("<Q", out.data_ptr()), bytes(16)]
    assert b"".join(values[5:]) == b"".join(numbers)


def test_other_memory_and_other_threads_blocks(fake: Driver) -> None:
    x, y = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2))
    out = torch.zeros(64)
    launcher = _launcher(_launch(x))
    spare = launcher._spare.pop() if launcher._spare else launcher._build.layout.block()
    host.run([launcher], Given(y), {"out": out})
    launcher._spare.append(spare)
    host.run([launcher], Given(x), {"out": out})
    addresses = [struct.unpack("<Q", seen["values"][0][:8])[0] for seen in fake.launched]
    assert addresses == [y.data_ptr(), x.data_ptr()]
    assert fake.launched[0]["values"][5:] != fake.launched[1]["values"][5:]


def test_names_and_types_of_leaves(fake: Driver) -> None:
    what = launch.specialise(_launch(torch.zeros(65, 64, dtype=torch.bfloat16)[1:]))
    assert what.signature == {
        "copy.x.desc": "tensordesc<bf16[64, 64]>", "copy.x.ptr": "*bf16", "copy.x.rows": "i32",
        "copy.x.stride_row": "i32", "copy.scales.0": "fp32", "out_ptr": "*fp32",
    }  # fmt: skip
    assert what.constexprs == {
        "copy.x.flag": None, "copy.x.BLOCK": 64, "copy.scales.1": 3, "copy.function": doubled, "SUM": True,
    }  # fmt: skip
    assert what.divisible == ("copy.x.ptr", "copy.x.stride_row", "out_ptr")
    assert what.tree["copy"].x.rows == "copy.x.rows" and what.tree["copy"].scales[1] == "copy.scales.1"


def test_lengths_need_no_build_and_dtypes_strides_and_addresses_do(fake: Driver) -> None:
    wide = torch.zeros(200, 64, dtype=torch.bfloat16)
    for rows in (17, 18, 1, 16, 4096, 2**31 - 1):
        _launcher(_launch(wide[: 64 + rows % 7], rows))
    assert len(build._builds) == 1
    others = [
        _launch(wide.half()), _launch(wide, 2**31), _launch(wide, stride=72), _launch(wide, stride=1),
        _launch(wide, stride=2**32), _launch(wide.flatten()[1:65].view(1, 64)),
        _launch(wide)._replace(options={"num_warps": 4}),
    ]  # fmt: skip
    for other in others:
        _launcher(other)
    # Strides of 72 and 1 are both no multiples of 16, and neither is a constant.
    assert len(build._builds) == len(others)


def test_equal_keys_are_equal_specialisations(fake: Driver) -> None:
    wide = torch.zeros(200, 64, dtype=torch.bfloat16)
    launches = [
        _launch(wide[: 64 + n], rows, stride, offset)
        for n in (0, 1) for rows in (1, 16, 2**31, Const(1), Const(0)) for stride in (1, 16, 72, 2**32)
        for offset in (0, 16)
    ]  # fmt: skip
    by_key: dict[Any, Any] = {}
    for each in launches:
        what = launch.specialise(each)
        assert by_key.setdefault(launch.lower(each)[0], what) == what
    assert len(by_key) == len({repr(what) for what in by_key.values()}) == 12


def test_launches_of_other_lengths_in_other_threads(fake: Driver) -> None:
    """They share blocks: what the driver reads is of one launch, whole."""
    at_once, wide = 4, torch.zeros(200, 64, dtype=torch.bfloat16)
    made = [_launcher(_launch(wide, rows, 64, 16 * (rows % 3))) for rows in range(100, 100 + at_once)]
    tensors = [(torch.zeros(64), torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in made]

    def start(n: int) -> None:
        out, x = tensors[n % at_once]
        host.run([made[n % at_once]], Given(x), {"out": out})

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(start, range(400)))
    assert len(build._builds) == 1 and len(fake.launched) == 400 and len(made[0]._build.layout.spare) <= at_once
    for n, (launcher, (out, x)) in enumerate(zip(made, tensors, strict=True)):
        mine = [seen for seen in fake.launched if seen["values"][6] == struct.pack("<i", 100 + n)]
        assert len(mine) == 100
        for seen in mine:
            addresses = seen["values"][0][:8] + seen["values"][5] + seen["values"][9]
            offset = 16 * ((100 + n) % 3)
            assert addresses == struct.pack("<QQQ", x.data_ptr(), x.data_ptr(), out.data_ptr() + offset)
            assert seen["sizes"][0] == launcher.programs


@pytest.mark.parametrize("name", ["k", "made", "dq", "tensors[0]", "numbers[2]"])
def test_operands_that_no_record_has_are_refused_before_a_launch(fake: Driver, name: str) -> None:
    """A wrong name, one that is None, a tensor and a number of a tuple that are not there."""
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    wrong = _launch(x)._replace(arguments={**_launch(x).arguments, "out_ptr": Pointer(torch.float32, name)})
    made: dict[str, Any] = {"dq": None}
    for device in ("cuda:0", "cpu"):
        with pytest.raises(LookupError, match="scaled_copy has an operand|out of range"):
            Launcher(wrong, torch.device(device), Given(x), made)
    plan = Plan(torch.device("cuda", 0), lambda *_: ({}, {"scaled_copy": wrong}))
    with pytest.raises(LookupError):
        plan.run(Given(x), made)
    assert not fake.launched and not build._builds


def test_a_plan_allocates_and_launches_where_its_device_is_current(
    fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, seen = [0], list[tuple[int, tuple[Any, ...]]]()

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    def allocate(*layout: Any) -> torch.Tensor:
        seen.append((current[-1], layout))
        return torch.empty_strided(*layout[:2], dtype=layout[2])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", allocate)
    x, there = torch.zeros(64, 64, dtype=torch.bfloat16), torch.device("cuda", 1)
    plan = Plan(there, lambda *_: ({"out": empty(there, (2, 0, 32), torch.int32)}, {"scaled_copy": _launch(x)}))
    for _ in range(2):
        made = plan.run(Given(x), {})
        assert made["out"].shape == (2, 0, 32) and made["out"].is_contiguous()
    assert seen == [(1, ((2, 0, 32), (32, 32, 1), torch.int32))] * 2 and current == [0]
    assert len(fake.launched) == 2


def test_memory_is_filled_where_pytorch_fills_it() -> None:
    plan = Plan(torch.device("cpu"), lambda *_: ({"out": empty(torch.device("cpu"), (3, 5))}, {"none": _none()}))
    plan.run(Given(None), {})
    with poisoned_memory():
        found = plan.run(Given(None), {})["out"]
    assert found.shape == (3, 5) and found.isnan().all()


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_operands_are_found_by_name(fake: Driver, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields, one of several, what a plan makes, and numbers; two addresses of each, one with an offset."""
    kinds = {"x": torch.bfloat16, "tensors[1]": torch.int32, "out": torch.float32}
    leaves = {f"{name} {at}": Pointer(dtype, name, at) for name, dtype in kinds.items() for at in (0, 32)}
    leaves |= {f"n{n}": Captured(f"numbers[{n}]", kind) for n, kind in enumerate(("fp64", "i64"))}
    what = {name: "*i8" if isinstance(leaf, Pointer) else leaf.kind for name, leaf in leaves.items()}
    layout = driver.BlockLayout(what, 32, 0)
    places = [(layout.words[name] if isinstance(leaf, Pointer) else None, None) for name, leaf in leaves.items()]
    made_of = Launch(SimpleNamespace(__name__="f", arg_names=list(leaves)), 1, leaves, {})
    found = build.LoadedKernel(None, tuple(leaves), None, 7, layout, places)
    monkeypatch.setattr(build, "find_build", lambda *given: found)
    monkeypatch.setattr(host, "interpret", lambda launched: fake.by_triton.append(launched.arguments))
    fake.sizes = [driver.SIZES[code] for codes in layout.formats.values() for code in codes]
    calls = []
    for n in (1, 2):
        x, *several = torch.zeros(3, 64, dtype=torch.int32)
        given = Given(x.view(torch.bfloat16), (n + 0.5, -n), several, out=torch.zeros(64))
        calls.append((given, {"out": torch.zeros(64)}))
    launcher = Launcher(made_of, torch.device(device), *calls[0])
    for tensors, made in calls:
        host.run([launcher], tensors, made)
        if device == "cpu":
            seen = fake.by_triton.pop()
            addresses = [seen[name].data_ptr() for name in leaves if name[0] != "n"]
            assert [seen["n0"], seen["n1"]] == list(tensors.numbers)
        else:
            values = fake.launched.pop()["values"]
            addresses = [struct.unpack("<Q", value)[0] for value in values[:6]]
            assert (struct.unpack("<d", values[6]), struct.unpack("<q", values[7])) == (
                (tensors.numbers[0],), (tensors.numbers[1],)
            )  # fmt: skip
        assert addresses == [
            x.data_ptr() + offset for x in (tensors.x, tensors.tensors[1], made["out"]) for offset in (0, 32)
        ]


def test_a_refusal_of_the_driver_has_its_name(fake: Driver) -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    launcher = _launcher(_launch(x))
    fake.status = 700
    with pytest.raises(driver.DriverError, match=r"launch of scaled_copy: CUDA_ERROR_OF_THE_TEST \(700\)"):
        host.run([launcher], Given(x), {"out": torch.zeros(64)})


def test_an_unknown_kernel_interface_is_left_to_triton(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "layout", lambda signature: {"x": "Q"})
    x, out = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64)
    host.run([_launcher(_launch(x, offset=16))], Given(x), {"out": out})
    ((grid, (desc, *leaves, behind), stream),) = fake.by_triton
    assert grid == (6, 1, 1) and stream == 0x1234_5678_9ABC and fake.launched == []
    assert desc.base is x and leaves[0] is x and leaves[1:] == [17, 64, 0.25]
    assert behind.data_ptr() == out.data_ptr() + 16 and behind.dtype == torch.float32


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
    what = launch.Specialisation({"x_ptr": "*fp32"}, {}, (), {"x_ptr": "x_ptr"})
    assert build.why_unknown(what, SimpleNamespace(metadata=about, asm={})) == "it needs scratch memory"


@pytest.mark.parametrize(("shared", "threads"), [(1 << 16, 256), (1 << 12, 256), (1 << 16, 128)])
def test_code_is_loaded_without_a_launcher(shared: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which Triton 3.6 runs a compiler of C; what needs more than the device has is refused, as by Triton."""
    from triton.runtime import driver as triton_driver
    from triton.runtime.errors import OutOfResources

    loaded: list[tuple[Any, ...]] = []

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": shared}

        def load_binary(self, *given: Any) -> tuple[int, ...]:
            loaded.append(given)
            return 5, 77, 32, 0, threads

    what = launch.specialise(_launch(torch.zeros(64, 64, dtype=torch.bfloat16)))
    compiled = launch.compile_kernel(scaled_copy, what, {"num_warps": 8}, GPUTarget("cuda", 90, 32))
    needed = compiled.metadata.shared
    monkeypatch.setattr(triton_driver, "_active", SimpleNamespace(utils=Utils()))
    if needed > shared or threads < 256:
        with pytest.raises(OutOfResources):
            build._load_code(compiled, 3)
        return
    build._load_code(compiled, 3)
    assert loaded == [(compiled.name, compiled.kernel, needed, 3)] and compiled.function == 77


def test_a_build_is_made_once_by_however_many_threads(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is to be built meanwhile is asked for between the compiler's front end and its passes, once."""
    seen: list[str] = []
    adds = CUDABackend.add_stages

    def add_stages(self: Any, *given: Any) -> None:
        seen.append("stages")
        adds(self, *given)

    monkeypatch.setattr(CUDABackend, "add_stages", add_stages)
    step = _launch(torch.zeros(64, 64, dtype=torch.bfloat16))

    def find(_: int) -> build.LoadedKernel:
        launch.MEANWHILE.set(lambda: seen.append("front end"))
        return build.find_build(step, 0)

    with triton.knobs.compilation.scope(), ThreadPoolExecutor(3) as pool:
        triton.knobs.compilation.always_compile = True
        first, *others = pool.map(find, range(3))
    assert others == [first, first] and seen == ["stages", "front end"]
