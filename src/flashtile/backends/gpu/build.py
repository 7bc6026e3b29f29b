"""Kernels that are loaded: from an archive of kernels built ahead, or compiled here, once a kind of launch."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flashtile.backends.gpu import archive, driver
from flashtile.backends.gpu.launch import (
    COMPILED,
    IMPORTS,
    Launch,
    Specialisation,
    compile_kernel,
    lower,
    specialise,
    text_of,
)
from flashtile.call import backend as base
from flashtile.call import events
from flashtile.call.backend import LOADED
from flashtile.call.problem import AHEAD, Gpu
from flashtile.core import settings
from flashtile.core.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A kernel compiled and loaded on a device.

    Attributes:
        compiled: Triton's object, or an archive's, which keeps the code loaded.
        names: Names of the run-time leaves, in order.
        unknown: Why the kernel cannot be launched without Triton, or None.
        function: The driver's handle.
        layout: Layout of its argument block; None if it cannot be launched without Triton.
        places: For each run-time leaf, in order: the 64-bit word of a block that its address is written to, None for a
            number, and of a tensor descriptor (box, swizzle, bytes of an element).
        archive: Path of the archive that it was loaded from, empty if Triton made it.
        seconds: How long a call waited while it was compiled; None for one of an archive, or of Triton's cache.
    """

    compiled: Any
    names: tuple[str, ...]
    unknown: str | None
    function: int
    layout: driver.BlockLayout | None
    places: list[tuple[int | None, tuple[Any, ...] | None]]
    archive: str = ""
    seconds: float | None = None

    @property
    def origin(self) -> str:
        """Where its code came from."""
        if self.archive:
            return f"from an archive ({self.archive})"
        return "from Triton's cache" if self.seconds is None else f"compiled in {self.seconds:.1f} s"


# Keys keep their kernels alive; the tensor maps' makers keep Gluon's layouts alive.
_builds: dict[tuple[Any, ...], LoadedKernel] = {}
_locks: dict[tuple[Any, ...], threading.Lock] = {}


def find_build(launch: Launch, device: int, key: tuple[Any, ...] | None = None) -> LoadedKernel:
    """The build of a launch on a device, made if this process has not seen it; key: what ``lower`` says.

    Waits for another thread that is making it.
    """
    lowered = key or lower(launch)[0]
    key = device, *lowered
    if key not in _builds:
        made = None
        with _locks.setdefault(key, threading.Lock()):
            if key not in _builds:
                made = _builds[key] = _from_archive(launch, lowered, device) or _compiled(launch, device)
        if made is not None and made.seconds is not None:
            events.compiled(launch.kernel.__name__, made.seconds)
    return _builds[key]


def missing(*, gluon: bool = False) -> str | None:
    """Why kernels, of Triton or of Gluon, can neither be compiled nor come from an archive; None if they can.

    Where another machine's GPU is spoken of, this one lacks nothing.
    """
    return None if archive.archives() or AHEAD.get() is not None else _no_compiler(gluon)


@functools.cache
def _no_compiler(gluon: bool) -> str | None:
    if (found := find_spec("triton")) is None:
        return "needs Triton, which is not installed"
    # To look for a package within Triton would import Triton.
    if gluon and not any(
        Path(each, "experimental", "gluon").is_dir() for each in found.submodule_search_locations or ()
    ):
        return "needs Triton 3.6 or later, which brings Gluon"
    return None


def _compiled(launch: Launch, device: int) -> LoadedKernel:
    if why := _no_compiler(gluon=False):
        raise UnsupportedError(
            f"the kernel {launch.kernel.__name__} of this call is in no archive of kernels, and to be compiled it {why}"
        )
    if (place := settings.RECORD.text()) and torch.version.hip is None:  # archives hold no code for AMD
        _record(launch, os.path.expanduser(place))
    start_s = time.perf_counter()
    start_hashing()
    what = specialise(launch)
    with _alone(launch):
        made = make_build(what, load(launch, what, device))
    return replace(made, seconds=time.perf_counter() - start_s) if COMPILED.get() else made


def _record(launch: Launch, place: str) -> None:
    """Adds a line to the list of what was compiled. One write, so that lines of several processes stay whole."""
    from flashtile.backends.gpu.ahead import as_json  # what few programs need is not loaded by all

    try:
        file = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, f"{as_json(launch)}\n".encode())
        finally:
            os.close(file)
    except OSError as error:  # the call itself can go on
        warnings.warn(f"{settings.RECORD.name}: {place} cannot be written: {error.strerror}", stacklevel=4)


@contextmanager
def _alone(launch: Launch) -> Iterator[None]:
    """Within, no other process compiles the same kernel: a host's ranks wait for one and find it in the cache."""
    import fcntl  # no Triton is where this is not

    from triton import knobs

    folder = Path(knobs.cache.dir, "flashtile-locks")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(str(text_of(lower(launch)[0])).encode()).hexdigest()
        file = open(folder / name, "w")  # noqa: SIM115
    except OSError:  # a folder that cannot be written has no cache either
        yield
        return
    with file:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_archive(launch: Launch, lowered: tuple[Any, ...], device: int) -> LoadedKernel | None:
    """The build among the archives; None if it is not there, or if the driver refuses it."""
    if not archive.archives() or not is_direct():
        return None
    if (found := archive.look_up(text_of(lowered), device)) is None:
        return None
    try:
        made = replace(known_build(found.about, archive.load(found, device)), archive=found.place)
        if len(made.names) == len(lower(launch)[1]):
            LOADED.set(True)
            return made
        why = f"it takes {len(made.names)} arguments"
    except (driver.DriverError, *archive.DAMAGE) as error:
        why = str(error)
    warnings.warn(f"a kernel of an archive is compiled instead: {launch.kernel.__name__}: {why}", stacklevel=4)
    return None


def load(launch: Launch, what: Specialisation, device: int) -> Any:
    """Triton's compiled kernel, loaded on a device."""
    from triton.runtime import driver as triton_driver

    start_hashing().join()
    with torch.cuda.device(device):
        compiled = compile_kernel(launch.kernel, what, launch.options, triton_driver.active.get_current_target())
        # Triton's launcher knows no tensor maps in records: it takes each leaf as a parameter, as the kernel does.
        compiled.src = SimpleNamespace(signature=dict(enumerate(what.signature.values())), constants={})
        if is_direct() and why_unknown(what, compiled) is None:
            _load_code(compiled, device)
        else:
            _ = compiled.run  # loads the code; raises if it needs more than the device has
    return compiled


def expect_compiling() -> None:
    """``start_hashing``, unless archives are expected to have all that a call needs."""
    if not archive.archives():
        start_hashing()


@functools.cache
def start_hashing() -> threading.Thread:
    """Has Triton hash its own 400 MB, for the keys of its cache, while a process imports its first kernels."""
    thread = threading.Thread(target=_hash)
    thread.start()
    return thread


def _hash() -> None:
    with IMPORTS:
        cache = importlib.import_module("triton.runtime.cache")
    # Where another release keeps it elsewhere, its first build calls it.
    getattr(cache, "triton_key", int)()


def _load_code(compiled: Any, device: int) -> None:
    """As Triton loads it, but for its launcher, which 3.6 compiles from C for each signature: half a second each."""
    from triton.runtime import driver as triton_driver
    from triton.runtime.errors import OutOfResources

    utils, needed, threads = triton_driver.active.utils, compiled.metadata.shared, 32 * compiled.metadata.num_warps
    if needed > (most := utils.get_device_properties(device)["max_shared_mem"]):
        raise OutOfResources(needed, most, "shared memory")
    compiled.module, compiled.function, *_, most = utils.load_binary(compiled.name, compiled.kernel, needed, device)
    if threads > most:
        raise OutOfResources(threads, most, "threads")


def make_build(what: Specialisation, compiled: Any) -> LoadedKernel:
    """The record that launches need of a compiled kernel."""
    unknown = why_unknown(what, compiled)
    if unknown is not None:
        return LoadedKernel(compiled, tuple(what.signature), unknown, compiled.function, None, [])
    return known_build(about_of(what, compiled), compiled)


def about_of(what: Specialisation, compiled: Any) -> dict[str, Any]:
    """What launches need to know of a compiled kernel for which ``why_unknown`` has no reason, as JSON values."""
    about = compiled.metadata
    maps = [[list(each["block_size"]), each["swizzle"], each["elem_size"]] for each in about.tensordesc_meta or []]
    # How a box lies in shared memory matters no more.
    leaves = [[name, kind[: kind.find("]") + 1] or kind] for name, kind in what.signature.items()]
    return {"name": about.name, "num_warps": about.num_warps, "shared": about.shared, "leaves": leaves, "maps": maps}


def known_build(about: Mapping[str, Any], compiled: Any) -> LoadedKernel:
    """The record of loaded code, from ``about_of`` it."""
    signature, maps = dict(about["leaves"]), iter(about["maps"])
    layout = driver.BlockLayout(signature, 32 * about["num_warps"], about["shared"])
    places: list[Any] = []
    for name, kind in signature.items():
        about_map = None
        if kind.startswith("tensordesc"):
            box, swizzle, size = next(maps)
            about_map = (tuple(box), swizzle, size)
        places.append((layout.words[name] if about_map or kind.startswith("*") else None, about_map))
    return LoadedKernel(compiled, tuple(signature), None, compiled.function, layout, places)


def why_unknown(what: Specialisation, compiled: Any) -> str | None:
    """Why this module cannot launch a compiled kernel, or None."""
    about = compiled.metadata
    descriptors = sum(kind.startswith("tensordesc") for kind in what.signature.values())
    maps = getattr(about, "tensordesc_meta", None) or []
    if descriptors != len(maps) or any(each.get("fp4_padded") for each in maps):
        return "its tensor descriptors are not tensor maps"
    if about.global_scratch_size or getattr(about, "profile_scratch_size", 0):
        return "it needs scratch memory"
    if about.num_ctas != 1 or about.launch_cooperative_grid or about.launch_pdl:
        return "it needs launch attributes"
    try:
        expected = [driver.SIZES[code] for codes in driver.layout(what.signature).values() for code in codes]
    except KeyError as error:
        return f"it has an argument of type {error}"
    found = driver.parameter_sizes(compiled.asm["ptx"])
    if found != expected:
        return f"its parameters have {found} bytes, {expected} were expected"
    return None


@functools.cache
def launcher() -> str:
    """Which launcher runs NVIDIA kernels: ``"driver"``, or ``"triton"`` with the reason."""
    if settings.LAUNCHER.get() == "triton":
        return f"triton ({settings.LAUNCHER.name}=triton)"
    try:
        driver.ensure_context(torch.cuda.current_device())
        return "driver" if driver.address_comes_first() else "triton (tensor maps of an unknown form)"
    except (OSError, AttributeError, driver.DriverError) as error:
        return f"triton ({error})"


def is_direct() -> bool:
    """Whether kernels are launched without Triton."""
    return torch.version.hip is None and launcher() == "driver"


def builds(launches: Mapping[str, Launch]) -> list[base.Build]:
    """The result of ``Backend.builds`` for launches by name: on the current device, or for ``AHEAD``."""
    partial = functools.partial
    make: Callable[[Launch], object]
    if (gpu := AHEAD.get()) is None:
        device = torch.cuda.current_device()
        make, source = partial(find_build, device=device), partial(_source, device=device)
    else:
        from flashtile.backends.gpu.ahead import RECORDER

        make, source = partial(_make_ahead, gpu=gpu, recorder=RECORDER.get()), partial(_source_ahead, gpu=gpu)
    return [base.Build(name, partial(make, launch), partial(source, launch)) for name, launch in launches.items()]


def _make_ahead(launch: Launch, gpu: Gpu, recorder: Any) -> None:
    if why := _no_compiler(gluon=False):
        raise UnsupportedError(f"to compile the kernel {launch.kernel.__name__} {why}")
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)
    if recorder is None:
        compile_kernel(launch.kernel, specialise(launch), launch.options, target)
    else:
        recorder.build(launch, target)


# -- what is said of builds without making them ----------------------------------------------------------------------


def _source(launch: Launch, device: int) -> str:
    lowered = lower(launch)[0]
    if (made := _builds.get((device, *lowered))) is not None:
        return (
            f"from an archive ({made.archive}), loaded already" if made.archive else "compiled already in this process"
        )
    found = archive.look_up(text_of(lowered), device) if archive.archives() and is_direct() else None
    if found is None and (why := _no_compiler(gluon=False)):
        return f"in no archive, and to be compiled it {why}"
    return _said(launch, found)


def _source_ahead(launch: Launch, gpu: Gpu) -> str:
    text, arch = text_of(lower(launch)[0]), f"sm_{gpu.arch}"
    return _said(launch, None if text is None else archive.look_up_in(archive.archives(arch), arch, text))


def _said(launch: Launch, found: archive.Found | None) -> str:
    if found is not None:
        return f"from an archive ({found.place})"
    # Roughly, on the host of an H100: Gluon's kernels, Triton's, and the short ones beside them.
    kernel = launch.kernel
    seconds = 1 if "attention" not in kernel.__name__ else 8 if ".hopper." in repr(kernel) else 2
    return f"will be compiled (about {seconds} s, unless Triton's cache has it)"


def used() -> str:
    """How many kernels this process has from archives, and which it has compiled; empty if there is none."""
    if not (made := _builds.copy()):
        return ""
    compiled = Counter(key[1].__name__ for key, each in made.items() if not each.archive)
    names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in compiled.items())
    from_archives = len(made) - compiled.total()
    return f"this process so far: {from_archives} from archives, {compiled.total()} compiled{names and f' ({names})'}"
