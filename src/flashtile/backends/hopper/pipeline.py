"""Channels between the warp that loads and the warpgroups that compute: no role sees a barrier, a stage or a phase.

A channel is a ring of shared-memory buffers. Both ends count their uses of it from 0; use ``u`` lives in buffer
``u % stages``, and the parity of ``u // stages`` tells this round of the ring from the last one.
"""

# ruff: noqa: RET505 - Triton compiles what stands behind a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.hopper.gluon_compat import aggregate


@aggregate
class Ring:
    """One channel: ``buffers`` [stages, ...tile], and a barrier a buffer for each direction.

    The producer calls ``acquire`` and starts a load that signals the barrier it gets, or calls ``claim``, writes, and
    calls ``publish``. Every consumer calls ``wait``, reads, and calls ``release``.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def stage(self, use):
        """Which buffer a use lives in. Uses are not negative, which the compiler does not know: a mask is cheaper."""
        if self.stages & (self.stages - 1) == 0:
            return use & (self.stages - 1)
        else:
            return use % self.stages

    @gluon.jit
    def parity(self, use):
        """Tells this round of the ring from the last one."""
        if self.stages == 1:
            return use & 1
        elif self.stages == 2:
            return (use >> 1) & 1
        elif self.stages == 4:
            return (use >> 2) & 1
        else:
            return (use // self.stages) & 1

    @gluon.jit
    def claim(self, use):
        """Waits until every consumer has released the buffer of the use before."""
        mbarrier.wait(self.empty.index(self.stage(use)), self.parity(use) ^ 1)

    @gluon.jit
    def publish(self, use):
        """What was written to a claimed buffer is complete."""
        mbarrier.arrive(self.full.index(self.stage(use)), count=1)

    @gluon.jit
    def acquire(self, use, num_bytes: gl.constexpr):
        """Claims a buffer for a load of ``num_bytes``; returns the barrier that the load must signal."""
        self.claim(use)
        full = self.full.index(self.stage(use))
        mbarrier.expect(full, num_bytes)
        return full

    @gluon.jit
    def wait(self, use, pred=True):
        """Waits until the load of this use has landed."""
        mbarrier.wait(self.full.index(self.stage(use)), self.parity(use), pred=pred)

    @gluon.jit
    def at(self, use):
        """The buffer of a use."""
        return self.buffers.index(self.stage(use))

    @gluon.jit
    def release(self, use, pred=True):
        """This consumer no longer reads the buffer. A use must have been waited for before it is released."""
        mbarrier.arrive(self.empty.index(self.stage(use)), count=1, pred=pred)

    @gluon.jit
    def skip(self, use, count, pred):
        """Passes over ``count`` uses, 0 or 1, that this consumer has no need of."""
        self.wait(use, pred & (count == 1))
        self.release(use, pred & (count == 1))


@gluon.jit
def make_ring(
    dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr, consumers: gl.constexpr
):
    """A ring of ``stages`` buffers of shape ``tile``, each released by ``consumers`` warpgroups."""
    buffers = gl.allocate_shared_memory(dtype, [stages] + tile, layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=consumers)
    return Ring(buffers, full, empty, stages)


@gluon.jit
def make_ring_beside(ring, dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr):
    """A ring of as many buffers as another one's, claimed and released with them.

    It has no barriers of its own for that. Nobody would use them, so the compiler would give their memory to a buffer,
    and what is loaded to where a barrier was initialised may come out wrong: PTX wants the barrier invalidated before,
    and on an H200 NaN was seen there.
    """
    buffers = gl.allocate_shared_memory(dtype, [ring.stages] + tile, layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [ring.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(ring.stages):
        mbarrier.init(full.index(stage), count=1)
    return Ring(buffers, full, ring.empty, ring.stages)
