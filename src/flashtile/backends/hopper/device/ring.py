"""Channels between the producer and the consuming warpgroups: roles use no barrier, stage or phase themselves.

A channel is a ring of shared-memory buffers. Both ends count its uses from 0. Use ``u`` has buffer ``u % stages``, and
the parity of ``u // stages`` distinguishes this round of the ring from the one before.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashtile.backends.hopper.device.gluon_compat import aggregate, arrive_after_copies


@aggregate
class Ring:
    """One channel: ``buffers`` [stages * parts, ...tile], and a barrier per stage for each direction.

    The producer calls ``acquire`` and starts a load that signals the barrier it returns; or calls ``claim``, writes,
    and calls ``publish``. Every consumer calls ``wait``, reads, and calls ``release``. The barriers are None if one
    role keeps the buffers to itself.

    COPIED: the producer's threads claim, copy by ``copy_async`` and call ``publish_copies``. WGMMA may read these
        copies
    only after a proxy fence that follows their end. So the consumers, who have waited for the copies, fence.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor | gl.constexpr
    empty: gl.shared_memory_descriptor | gl.constexpr
    stages: gl.constexpr
    parts: gl.constexpr
    COPIED: gl.constexpr

    @gluon.jit
    def stage(self, use):
        """The number of a use's buffer, by a mask if possible: the compiler does not know that no use is negative."""
        if self.stages & (self.stages - 1) == 0:
            return use & (self.stages - 1)
        else:
            return use % self.stages

    @gluon.jit
    def parity(self, use):
        """The parity that distinguishes this round of the ring from the one before."""
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
        """Signals that writing to a claimed buffer is complete."""
        mbarrier.arrive(self.full.index(self.stage(use)), count=1)

    @gluon.jit
    def publish_copies(self, use):
        """Signals, once a thread's copies to a claimed buffer are complete; every thread calls it."""
        arrive_after_copies(self.full.index(self.stage(use)), increment_count=False)

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
        if self.COPIED:
            fence_async_shared()

    @gluon.jit
    def at(self, use):
        """The buffer of a use."""
        return self.buffers.index(self.stage(use))

    @gluon.jit
    def part(self, use, i):
        """One buffer of a use that has several."""
        return self.buffers.index(use % self.stages * self.parts + i)

    @gluon.jit
    def fixed_part(self, use, i, step):
        """``part``, recomputed in each step: step >> 30 is 0, which hides that the address is loop invariant.

        Otherwise the compiler would keep an address for each product in registers, and these spill.
        """
        return self.buffers.index(use % self.stages * self.parts + i + (step >> 30))

    @gluon.jit
    def release(self, use, pred=True):
        """Signals that this consumer no longer reads the buffer. A use must be waited for before it is released."""
        mbarrier.arrive(self.empty.index(self.stage(use)), count=1, pred=pred)

    @gluon.jit
    def skip(self, use, count, pred):
        """Skips ``count`` uses, 0 or 1, that this consumer does not need."""
        self.wait(use, pred & (count == 1))
        self.release(use, pred & (count == 1))


@gluon.jit
def make_ring(dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr,
              consumers: gl.constexpr, producers: gl.constexpr = 1, parts: gl.constexpr = 1,
              COPIERS: gl.constexpr = 0):  # fmt: skip
    """A ring of ``stages`` uses, each published by ``producers`` roles and released by ``consumers``.

    A use has a buffer of shape ``tile``, or ``parts`` of them. Without consumers one role keeps the buffers to itself.
    COPIERS: the number of threads of a role that copies, if there is one; each thread publishes its own copies.
    """
    buffers = gl.allocate_shared_memory(dtype, [stages * parts] + tile, layout)  # noqa: RUF005
    if consumers == 0:
        return Ring(buffers, None, None, stages, parts, False)
    else:
        full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(stages):
            mbarrier.init(full.index(stage), count=max(producers, COPIERS))
            mbarrier.init(empty.index(stage), count=consumers)
        return Ring(buffers, full, empty, stages, parts, COPIERS > 0)


@gluon.jit
def make_ring_beside(ring, dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr, producers: gl.constexpr = 1):
    """A ring with as many buffers as another ring, claimed and released with it, published by ``producers`` roles.

    It shares the other ring's ``empty`` barriers. Own barriers would be unused, so dead after their initialisation: the
    compiler would put a buffer over them, and PTX forbids that while a barrier is not invalidated (it gave NaN).
    """
    buffers = gl.allocate_shared_memory(dtype, [ring.stages] + tile, layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [ring.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(ring.stages):
        mbarrier.init(full.index(stage), count=producers)
    return Ring(buffers, full, ring.empty, ring.stages, 1, False)


@gluon.jit
def make_landing(ring, COPIERS: gl.constexpr = 0):
    """The buffers of ``ring``, claimed with its barriers but published through separate ones.

    A producer loads into the buffers, and another role converts the contents, which ``ring`` then publishes. COPIERS:
    as in ``make_ring``; the other role's reads need no proxy fence.
    """
    full = gl.allocate_shared_memory(gl.int64, [ring.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(ring.stages):
        mbarrier.init(full.index(stage), count=max(1, COPIERS))
    return Ring(ring.buffers, full, ring.empty, ring.stages, ring.parts, False)


# The place of the first warpgroup's numbers, and the number of places for each warpgroup.
FIRST_OWN, OWN_SLOTS = gl.constexpr(12), gl.constexpr(6)


@gluon.constexpr_function
def slot_of(fields, name):
    """The place of a number in a record; ``fields`` are the names, separated by blanks."""
    return fields.split().index(name)


@aggregate
class Records:
    """A ring of records of int32 numbers, which are read by their names.

    A record begins with ``fields``. From FIRST_OWN on it has ``own_fields``, up to OWN_SLOTS for each warpgroup.
    Numbers are read from shared memory when needed, so a tile costs the consumers no registers.

    asked: a barrier by which a reader asks for the record after a use; None if records are made as far ahead as there
    are buffers.
    """

    ring: Ring
    fields: gl.constexpr
    own_fields: gl.constexpr
    asked: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def get(self, use, NAME: gl.constexpr):
        """A number for all roles."""
        return self._read(use, slot_of(self.fields, NAME))

    @gluon.jit
    def get_own(self, use, NAME: gl.constexpr, WARPGROUP: gl.constexpr):
        """A number for one warpgroup."""
        return self._read(use, FIRST_OWN + OWN_SLOTS * WARPGROUP + slot_of(self.own_fields, NAME))

    @gluon.jit
    def ask(self, use, pred=True):
        """Asks for the record after ``use``, once for each."""
        if self.asked is not None:
            mbarrier.arrive(self.asked, count=1, pred=pred)

    @gluon.jit
    def claim_asked(self, use):
        """Waits for a buffer, and until the record has been asked for."""
        self.ring.claim(use)
        if self.asked is not None:
            mbarrier.wait(self.asked, (use & 1) ^ 1, pred=use > 0)

    @gluon.jit
    def next(self, use):
        """Releases a record and waits for the next one; returns the next one's use."""
        self.ring.release(use)
        self.ring.wait(use + 1)
        return use + 1

    @gluon.jit
    def _read(self, use, SLOT: gl.constexpr):
        one = self.ring.at(use).slice(SLOT, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        return gl.max(one, 0)


@gluon.jit
def make_records(FIELDS: gl.constexpr, OWN_FIELDS: gl.constexpr, SIZE: gl.constexpr, stages: gl.constexpr,
                 consumers: gl.constexpr, ASKED: gl.constexpr = False):  # fmt: skip
    """``stages`` records of SIZE numbers, each released by ``consumers`` roles."""
    ring = make_ring(gl.int32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]), stages, consumers)
    if ASKED:
        asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(asked, count=1)
        return Records(ring, FIELDS, OWN_FIELDS, asked)
    else:
        return Records(ring, FIELDS, OWN_FIELDS, None)
