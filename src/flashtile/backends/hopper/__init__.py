"""The Hopper backend: Gluon kernels with TMA, WGMMA, mbarriers and warp specialisation, for compute capability 9.0."""

from flashtile.backends.hopper.kernels import BACKEND as BACKEND
