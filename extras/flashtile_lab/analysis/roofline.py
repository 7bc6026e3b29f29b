"""Devices, and the roofline: how fast a kernel can run at a given arithmetic intensity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtile.core.errors import InvalidInputError
from flashtile_lab.analysis.shape import dtype_bytes, require_positive

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class Device:
    """The properties of an accelerator that the models use.

    Attributes:
        name: For tables and messages.
        peak_flops_per_s: Dense matrix FLOPs per second for elements of `peak_element_bytes`.
        hbm_bytes_per_s: Bandwidth of the device memory.
        exp_per_s: Exponentials per second of the special-function units; None when not known.
        on_chip_bytes: Shared memory that one thread block may use; None when not known.
        hbm_capacity_bytes: Size of the device memory; None when not known.
        peak_element_bytes: Element size the peak was stated for; None when it holds for any size.
        num_sms: Streaming multiprocessors; None when not known.
    """

    name: str
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    exp_per_s: float | None = None
    on_chip_bytes: int | None = None
    hbm_capacity_bytes: int | None = None
    peak_element_bytes: int | None = None
    num_sms: int | None = None

    def __post_init__(self) -> None:
        require_positive(peak_flops_per_s=self.peak_flops_per_s, hbm_bytes_per_s=self.hbm_bytes_per_s)
        optional = {
            "exp_per_s": self.exp_per_s,
            "on_chip_bytes": self.on_chip_bytes,
            "hbm_capacity_bytes": self.hbm_capacity_bytes,
            "peak_element_bytes": self.peak_element_bytes,
            "num_sms": self.num_sms,
        }
        require_positive(**{name: value for name, value in optional.items() if value is not None})

    @property
    def ridge_flops_per_byte(self) -> float:
        """Arithmetic intensity above which the peak, not the bandwidth, is the limit."""
        return self.peak_flops_per_s / self.hbm_bytes_per_s

    def states_peak_for(self, dtype: str) -> bool:
        """Whether the peak holds for elements of `dtype`."""
        return self.peak_element_bytes in (None, dtype_bytes(dtype))

    def check_dtype(self, dtype: str) -> None:
        """Raise for a dtype whose peak this record does not state.

        Raises:
            InvalidInputError: The dtype's element size is not the one the peak was stated for.
        """
        if not self.states_peak_for(dtype) and self.peak_element_bytes is not None:
            bits = 8 * self.peak_element_bytes
            raise InvalidInputError("dtype", f"{self.name} states its peak for {bits}-bit elements, not for {dtype}")


def _from_sm(
    name: str, num_sms: int, clock_hz: float, flops_per_cycle: int, hbm_tb_per_s: float, smem_kib: int, hbm_gb: int
) -> Device:
    """A device from one SM's rates per cycle: dense 16-bit FLOPs, and 4 special-function units in each quarter."""
    exps_per_cycle = 4 * 4
    return Device(
        name=name,
        peak_flops_per_s=num_sms * clock_hz * flops_per_cycle,
        hbm_bytes_per_s=hbm_tb_per_s * 1e12,
        exp_per_s=num_sms * clock_hz * exps_per_cycle,
        on_chip_bytes=smem_kib * 1024,
        hbm_capacity_bytes=hbm_gb * 10**9,
        peak_element_bytes=2,
        num_sms=num_sms,
    )


# The SXM modules, from NVIDIA's architecture white papers and data sheets: 312, 989.4 and 989.4 dense bf16 TFLOP/s. The
# clocks are the boost clocks those peaks are stated at; the shared memory is the most one thread block may ask for.
A100 = _from_sm("A100", 108, 1.41e9, 2048, hbm_tb_per_s=2.039, smem_kib=163, hbm_gb=80)
H100 = _from_sm("H100", 132, 1.83e9, 4096, hbm_tb_per_s=3.35, smem_kib=227, hbm_gb=80)
H200 = _from_sm("H200", 132, 1.83e9, 4096, hbm_tb_per_s=4.8, smem_kib=227, hbm_gb=141)
DEVICES = {device.name: device for device in (A100, H100, H200)}


def find_device(name: str) -> Device:
    """The device record of that name, in any case.

    Raises:
        InvalidInputError: There is none.
    """
    if name.upper() not in DEVICES:
        raise InvalidInputError("device", f"{name!r} is not known, must be one of {', '.join(DEVICES)}")
    return DEVICES[name.upper()]


@dataclass(frozen=True)
class Roofline:
    """A kernel's position under a device's roofline."""

    intensity_flops_per_byte: float
    attainable_flops_per_s: float
    bound: Bound
    time_s: float


def roofline_point(flops: float, hbm_bytes: float, device: Device) -> Roofline:
    """Attainable rate and shortest time of work that does `flops` and moves `hbm_bytes`.

    `attainable = min(peak, intensity * bandwidth)`; `time = max(flops / peak, bytes / bandwidth)`. Overlap is assumed
    perfect, and only the matrix units and the memory limit the time.

    Source: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009.

    Raises:
        InvalidInputError: `flops` or `hbm_bytes` is not greater than 0.
    """
    require_positive(flops=flops, hbm_bytes=hbm_bytes)
    intensity = flops / hbm_bytes
    bound: Bound = "compute" if intensity >= device.ridge_flops_per_byte else "memory"
    return Roofline(
        intensity_flops_per_byte=intensity,
        attainable_flops_per_s=min(device.peak_flops_per_s, intensity * device.hbm_bytes_per_s),
        bound=bound,
        time_s=max(flops / device.peak_flops_per_s, hbm_bytes / device.hbm_bytes_per_s),
    )
