"""The portable backend: Triton kernels for every GPU that Triton reaches, and for its interpreter on a CPU."""

from flashtile.backends.portable.kernels import BACKEND as BACKEND
