"""Channels between the producer and the warpgroups that consume: no role sees a barrier, a stage or a phase.

A channel is a ring of shared-memory buffers. Both ends count their uses of it from 0; use ``u`` lives in buffer
``u % stages``, and the parity of ``u // stages`` tells this round of the ring from the last one.
"""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashtile.backends.hopper.device.gluon_compat import aggregate, arrive_after_copies


@aggregate
class Ring:
    """One channel: ``buffers`` [stages * parts, ...tile], and a barrier per stage for each direction.

    The producer calls ``acquire`` and starts a load that signals the barrier it gets, or calls ``claim``, writes, and
    calls ``publish``. Every consumer calls ``wait``, reads, and calls ``release``. The barriers are None where one
    role keeps the buffers to itself.

    COPIED: the producer's threads claim, copy by ``copy_async`` and call ``publish_copies``. What they write WGMMA may
    read only behind a proxy fence, which must follow the copies' end: so consumers fence, who have waited for it.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor | gl.constexpr
    empty: gl.shared_memory_descriptor | gl.constexpr
    stages: gl.constexpr
    parts: gl.constexpr
    COPIED: gl.constexpr

    @gluon.jit
    def stage(self, use):
        """The buffer of a use, by a mask where it can: the compiler does not know that uses are not negative."""
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
    def publish_copies(self, use):
        """What a thread has copied to a claimed buffer is complete once its copies are; every thread calls it."""
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
        """One of the buffers of a use that has several."""
        return self.buffers.index(use % self.stages * self.parts + i)

    @gluon.jit
    def fixed_part(self, use, i, step):
        """``part``, recomputed in each step: step >> 30 is 0, but hides that the address is loop invariant.

        The compiler would keep an address for each product in registers, which spill.
        """
        return self.buffers.index(use % self.stages * self.parts + i + (step >> 30))

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
def make_ring(dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr,
              consumers: gl.constexpr, producers: gl.constexpr = 1, parts: gl.constexpr = 1,
              COPIERS: gl.constexpr = 0):  # fmt: skip
    """A ring of ``stages`` uses, each published by ``producers`` roles and released by ``consumers``.

    A use has a buffer of shape ``tile``, or ``parts`` of them. Without consumers one role keeps them to itself.
    COPIERS: threads of the role that copies, if one does; each publishes its own copies.
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
    """A ring of as many buffers as another one's, claimed and released with them, published by ``producers`` roles.

    It shares the other's ``empty`` barriers. Unused ones of its own would be dead after their initialisation, so the
    compiler would put a buffer over them, and PTX forbids that while a barrier is not invalidated (it gave NaN).
    """
    buffers = gl.allocate_shared_memory(dtype, [ring.stages] + tile, layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [ring.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(ring.stages):
        mbarrier.init(full.index(stage), count=producers)
    return Ring(buffers, full, ring.empty, ring.stages, 1, False)


@gluon.jit
def make_landing(ring):
    """The same buffers, claimed with ``ring``'s barriers but published through some of their own.

    A producer loads into them, and another role makes of that what ``ring`` publishes.
    """
    full = gl.allocate_shared_memory(gl.int64, [ring.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(ring.stages):
        mbarrier.init(full.index(stage), count=1)
    return Ring(ring.buffers, full, ring.empty, ring.stages, ring.parts, False)


# Where the numbers of the first warpgroup begin, and how many places each warpgroup has.
FIRST_OWN, OWN_SLOTS = gl.constexpr(12), gl.constexpr(6)


@gluon.constexpr_function
def slot_of(fields, name):
    """Where a record keeps a number: ``fields`` are its names, separated by blanks."""
    return fields.split().index(name)


@aggregate
class Records:
    """A ring of records of int32 numbers, each read by its name.

    A record begins with ``fields``; from FIRST_OWN on come ``own_fields``, up to OWN_SLOTS for each warpgroup. Read
    from shared memory when needed, a tile costs the consumers no registers.

    asked: a barrier by which a reader asks for the record that follows a use; None if they are found as far ahead as
    there are buffers.
    """

    ring: Ring
    fields: gl.constexpr
    own_fields: gl.constexpr
    asked: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def get(self, use, NAME: gl.constexpr):
        """A number that concerns all roles."""
        return self._read(use, slot_of(self.fields, NAME))

    @gluon.jit
    def get_own(self, use, NAME: gl.constexpr, WARPGROUP: gl.constexpr):
        """A number that concerns one warpgroup."""
        return self._read(use, FIRST_OWN + OWN_SLOTS * WARPGROUP + slot_of(self.own_fields, NAME))

    @gluon.jit
    def ask(self, use, pred=True):
        """Asks for the record after that of ``use``, once for each."""
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
        """Leaves a record for the next one; returns its use."""
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
