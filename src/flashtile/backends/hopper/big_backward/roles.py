"""The roles of the backward with big heads: two warps that load, a scorer and a follower of a warpgroup each.

A step is a block of 64 keys by 64 queries. Scores have keys first for every kind of tile, so that masks, mods and the
passed-on operands are the same for all gradients. Both warpgroups multiply a passed-on operand with every second chunk
of a step's columns: the scorer with the first, third, ..., the follower with the others.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.backward.roles import (
    FAR,
    kept_rows,
    pairs_of,
    probabilities,
    probs_scale,
    score_zeros,
)
from flashtile.backends.hopper.backward.scheduler import RowBlock, bounds_of, query_heads
from flashtile.backends.hopper.big_backward.scheduler import (
    BLOCK,
    first_step,
    key_rows,
    next_step,
    num_steps,
    out_rows,
    publish_tile,
    query_rows,
)
from flashtile.backends.hopper.device.gluon_compat import (
    aggregate,
    as_box,
    as_tile,
    tma_load,
    tma_put,
    tma_store_wait,
)
from flashtile.backends.hopper.device.parts import append, box_of, pieces, scale_by, wait_for_products, zero_accumulator
from flashtile.backends.hopper.device.ring import Records, Ring

# Columns of a box: as many as a swizzle of 128 bytes holds.
BOX = gl.constexpr(64)


@aggregate
class BigBackwardChannels:
    """The channels between the roles.

    Chunk c of step i is use ``i * chunks + c`` of a ring of passing chunks.

    Attributes:
        tile: The record of the program's tile.
        held: The tile's own queries or keys, one use of several chunks.
        held_v: Its own dout or values; None for dv.
        rows: [2, 64] float32 of a block of queries, see ``backward.rows``: one use for dq, else one a step.
        passing: Keys or queries, for the scores.
        passing_v: Values or dout, for dprobs; None for dv.
        adding: The second factor of the gradient's products: dout, or keys or queries once more. Each warpgroup has a
            ring with its own chunks alone as uses. With one ring for both, and an odd number of chunks in a step, a
            warpgroup may wait for a use while the other one's use of the same buffer has not landed yet. A barrier's
            parity does not distinguish the two uses.
        probs: The scorer's results for a step: probabilities, or for dq and dk their factors of dscores.
        dscores: The follower's gradients of scores; None for dv.
    """

    tile: Records
    held: Ring
    held_v: Ring | gl.constexpr
    rows: Ring
    passing: Ring
    passing_v: Ring | gl.constexpr
    adding: gl.tuple
    probs: Ring
    dscores: Ring | gl.constexpr


@gluon.jit
def load_chunk(desc, rows, row, chunk, full, col):
    """Starts the load of a chunk, from column ``col`` on, box by box."""
    for j in gl.static_range(chunk.shape[1] // BOX):
        tma_load(desc, rows.at(row, col + j * BOX), full, as_box(box_of(chunk, j * BOX, BOX), desc))


@gluon.jit
def load_held(desc, ring, rows, row):
    """Starts the load of a tile's held operand, which signals one barrier."""
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    full = ring.acquire(0, ring.parts * BLOCK * WIDTH * 2)
    for c in gl.static_range(ring.parts):
        load_chunk(desc, rows, row, ring.part(0, c), full, c * WIDTH)


@gluon.jit
def load_passing(desc, ring, rows, row, used, CHUNKS: gl.constexpr):
    """Starts the loads of a step's rows, a chunk of columns at a time."""
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    for c in gl.static_range(CHUNKS):
        use = used * CHUNKS + c
        full = ring.acquire(use, BLOCK * WIDTH * 2)
        load_chunk(desc, rows, row, ring.at(use), full, c * WIDTH)


@gluon.jit
def load_adding(desc, rings, rows, row, used, grid):
    """Starts the loads of a step's ``adding`` chunks, each to the ring of its warpgroup."""
    WIDTH: gl.constexpr = grid.tiles.CHUNK_OWN
    for c in gl.static_range(grid.tiles.NUM_OWN):
        ring = rings.adding[c % 2]
        # A ring's uses count its own warpgroup's chunks alone.
        use = used * ((grid.tiles.NUM_OWN + 1 - c % 2) // 2) + c // 2
        load_chunk(desc, rows, row, ring.at(use), ring.acquire(use, BLOCK * WIDTH * 2), c * WIDTH)


@gluon.jit
def load_rows(rings, used, block, grid):
    """Starts the load of the rows' numbers for a block of queries."""
    full = rings.rows.acquire(used, 2 * BLOCK * 4)
    tma_load(grid.gradients.rows, [2 * block, 0], full, rings.rows.at(used))


@gluon.jit
def producer(rings, grid):
    """Finds the program's tile, and loads the queries and keys of its scores with the queries' numbers by row."""
    CHUNKS: gl.constexpr = rings.held.parts
    records = rings.tile
    publish_tile(records, grid)
    records.ring.wait(0)
    steps = num_steps(records, grid)
    place = records.get(0, "place")
    step = first_step(records, grid)
    keys = key_rows(records, grid)
    if steps > 0:
        if grid.tiles.OF == "q":
            load_held(grid.call.q.desc, rings.held, query_rows(records, step, grid), place)
            load_rows(rings, 0, step.block, grid)
        else:
            load_held(grid.call.k.desc, rings.held, keys, place)
    used = 0
    while used < steps:
        if grid.tiles.OF == "q":
            load_passing(grid.call.k.desc, rings.passing, keys, step.place, used, CHUNKS)
        else:
            load_rows(rings, used, step.block, grid)
            load_passing(grid.call.q.desc, rings.passing, query_rows(records, step, grid), step.place, used, CHUNKS)
        step = next_step(step, records, grid)
        used += 1


@gluon.jit
def value_producer(rings, grid):
    """Loads dout and values for dprobs."""
    CHUNKS: gl.constexpr = rings.held_v.parts
    records = rings.tile
    records.ring.wait(0)
    steps = num_steps(records, grid)
    place = records.get(0, "place")
    step = first_step(records, grid)
    keys = key_rows(records, grid)
    if steps > 0:
        if grid.tiles.OF == "q":
            load_held(grid.gradients.dout.desc, rings.held_v, query_rows(records, step, grid), place)
        else:
            load_held(grid.call.v.desc, rings.held_v, keys, place)
    used = 0
    while used < steps:
        if grid.tiles.OF == "q":
            load_passing(grid.call.v.desc, rings.passing_v, keys, step.place, used, CHUNKS)
        else:
            rows = query_rows(records, step, grid)
            load_passing(grid.gradients.dout.desc, rings.passing_v, rows, step.place, used, CHUNKS)
        step = next_step(step, records, grid)
        used += 1


@gluon.jit
def gradient_producer(rings, grid):
    """Loads the ``adding`` chunks of the gradient."""
    records = rings.tile
    records.ring.wait(0)
    steps = num_steps(records, grid)
    step = first_step(records, grid)
    used = 0
    while used < steps:
        if grid.tiles.OF == "q":
            load_adding(grid.call.k.desc, rings, key_rows(records, grid), step.place, used, grid)
        else:
            rows = query_rows(records, step, grid)
            if grid.tiles.OF == "k":
                load_adding(grid.call.q.desc, rings, rows, step.place, used, grid)
            else:
                load_adding(grid.gradients.dout.desc, rings, rows, step.place, used, grid)
        step = next_step(step, records, grid)
        used += 1


@gluon.jit
def chunk_of(ring, used, c, CHUNKS: gl.constexpr):
    """Chunk c of a step, if possible at an address that is recomputed in each step, see ``Ring.fixed_part``."""
    if ring.stages == CHUNKS:
        return ring.fixed_part(0, c, used)
    else:
        return ring.at(used * CHUNKS + c)


@gluon.jit
def add_scores(x, held, passing, grid, ADDS: gl.constexpr):
    """Starts the product of chunks of keys and queries, or of values and dout: keys first."""
    if grid.tiles.OF == "q":
        return warpgroup_mma(passing, held.permute((1, 0)), x, use_acc=ADDS, is_async=True)
    else:
        return warpgroup_mma(held, passing.permute((1, 0)), x, use_acc=ADDS, is_async=True)


@gluon.jit
def start_sum(held, passing, used, x, grid, START: gl.constexpr, STOP: gl.constexpr):
    """Starts the products of held chunks and a step's chunks START ... STOP - 1, as they arrive."""
    CHUNKS: gl.constexpr = held.parts
    for c in gl.static_range(START, STOP):
        passing.wait(used * CHUNKS + c)
        x = add_scores(x, held.fixed_part(0, c, used), chunk_of(passing, used, c, CHUNKS), grid, c > 0)
    return x


@gluon.jit
def finish_sum(x, held, passing, used, grid, AHEAD: gl.constexpr, LATER: gl.constexpr):
    """The sum, if its chunks before AHEAD were started, and LATER other products after them.

    The other chunks' products are started once there is room: each chunk is released when its product is complete.
    """
    CHUNKS: gl.constexpr = held.parts
    for c in gl.static_range(CHUNKS):
        # The number of products that may be under way when the product of chunk c is complete.
        x = warpgroup_mma_wait(min(AHEAD, CHUNKS - c) - 1 + (LATER if c < AHEAD else 0), deps=[x])
        passing.release(used * CHUNKS + c)
        if c + AHEAD < CHUNKS:
            x = start_sum(held, passing, used, x, grid, c + AHEAD, c + AHEAD + 1)
    return x


@gluon.jit
def own_zeros(grid, WARPGROUP: gl.constexpr):
    """A warpgroup's zero accumulators, one for every second chunk."""
    accs = ()
    for _ in gl.static_range(WARPGROUP, grid.tiles.NUM_OWN, 2):
        accs = append(accs, zero_accumulator(BLOCK, grid.tiles.CHUNK_OWN))
    return accs


@gluon.jit
def start_own(a, ring, used, accs, i: gl.constexpr):
    """Starts the product of the passed-on operand and a warpgroup's chunk i of a step."""
    ring.wait(used * len(accs) + i)
    return warpgroup_mma(a, chunk_of(ring, used, i, len(accs)), accs[i], is_async=True)


@gluon.jit
def add_own(a, ring, used, accs):
    """Starts the products of the passed-on operand and a warpgroup's chunks of a step."""
    started = ()
    for i in gl.static_range(len(accs)):
        started = append(started, start_own(a, ring, used, accs, i))
    return started


@gluon.jit
def finish_own(accs, ring, used):
    """The sums. Each chunk is released once its product is complete."""
    for i in gl.static_range(len(accs)):
        accs = wait_for_products(accs, len(accs) - 1 - i)
        ring.release(used * len(accs) + i)
    return accs


@gluon.jit
def add_others(a, ring, used, accs):
    """Adds the products with a warpgroup's chunks after the first, which was started before, as they arrive."""
    done = wait_for_products((accs[0],))
    for i in gl.static_range(1, len(accs)):
        done = done + wait_for_products((start_own(a, ring, used, accs, i),))
        ring.release(used * len(accs) + i)
    return done


@gluon.jit
def rows_of_step(rings, step, grid, layout_like):
    """``KeyRows`` and ``RowBlock`` of a step: a block of keys, and one of queries."""
    records = rings.tile
    OF_ROWS: gl.constexpr = grid.tiles.OF == "q"
    b, head, place = records.get(0, "sequence"), records.get(0, "head"), records.get(0, "place")
    # For dq there are no bounds for a block of keys: each is masked.
    cleared = (gl.to_tensor(FAR), gl.to_tensor(0))
    key, row = step.place, place
    if not OF_ROWS:
        key, row = place, step.place
        if grid.call.mods.band.bounds is not None:
            _, _, all_start, all_stop = bounds_of(b, head, key, grid, 1)
            cleared = (all_start, all_stop)
        head, _ = query_heads(head, grid)
    seqlen_q, seqlen_k = records.get(0, "seqlen_q"), records.get(0, "seqlen_k")
    kept = kept_rows(key, seqlen_q, seqlen_k, b, head, cleared, (), layout_like, grid)
    return kept, RowBlock(row, step.head, step.block, step.remaining)


@gluon.jit
def rows_use(used, grid):
    """The use of ``rows`` for a step."""
    if grid.tiles.OF == "q":
        return used * 0
    else:
        return used


@gluon.jit
def score(s, rings, step, used, grid, mod):
    """``probabilities`` from a step's products."""
    kept, rows = rows_of_step(rings, step, grid, s)
    pairs = pairs_of(kept, rows, s, grid, mod)
    fetched = mod.fetch(pairs, s, grid.call.mods)
    lse_log2 = rings.rows.at(rows_use(used, grid)).slice(0, 1)
    return probabilities(s, lse_log2.load(s.type.layout), kept, grid, mod, pairs, fetched)


@gluon.jit
def dscores_operand(buffer, grid):
    """The gradients of scores as the left operand: rows or keys first, like the tile."""
    if grid.tiles.OF == "q":
        return buffer.permute((1, 0))
    else:
        return buffer


@gluon.jit
def hand_factors(s, rings, step, used, grid, mod):
    """Leaves the factors of a step's dscores for the follower."""
    rings.rows.wait(rows_use(used, grid))
    _, factor = score(s, rings, step, used, grid, mod)
    rings.probs.claim(used)
    of_probs: gl.constexpr = rings.probs.buffers.dtype
    rings.probs.at(used).store((factor * probs_scale(of_probs)).to(of_probs))
    rings.probs.publish(used)
    if grid.tiles.OF != "q":
        rings.rows.release(used)


@gluon.jit
def scorer(rings, grid, mod):
    """The warpgroup that computes the scores for a tile of dq or dk, one step ahead of its chunks of the gradient."""
    AHEAD: gl.constexpr = min(grid.tiles.CHUNKS, rings.held.parts)
    records = rings.tile
    zeros = score_zeros(grid)
    accs = own_zeros(grid, 0)
    records.ring.wait(0)
    steps = num_steps(records, grid)
    step = first_step(records, grid)
    used = 0
    if steps > 0:
        rings.held.wait(0)
        s = start_sum(rings.held, rings.passing, 0, zeros, grid, 0, AHEAD)
        s = finish_sum(s, rings.held, rings.passing, 0, grid, AHEAD, 0)
        hand_factors(s, rings, step, 0, grid, mod)
    while used + 1 < steps:
        step = next_step(step, records, grid)
        s = start_sum(rings.held, rings.passing, used + 1, zeros, grid, 0, AHEAD)
        rings.dscores.wait(used)
        ds = dscores_operand(rings.dscores.at(used), grid)
        first = start_own(ds, rings.adding[0], used, accs, 0)
        s = finish_sum(s, rings.held, rings.passing, used + 1, grid, AHEAD, 1)
        # This product was started before the last scores, unless all of the scores' products were started ahead of it.
        if rings.held.parts == AHEAD:
            first = warpgroup_mma_wait(0, deps=[first])
        rings.adding[0].release(used * len(accs))
        hand_factors(s, rings, step, used + 1, grid, mod)
        accs = add_others(ds, rings.adding[0], used, (first,) + accs[1:])  # noqa: RUF005
        rings.dscores.release(used)
        used += 1
    if steps > 0:
        rings.dscores.wait(used)
        ds = dscores_operand(rings.dscores.at(used), grid)
        first = warpgroup_mma_wait(0, deps=[start_own(ds, rings.adding[0], used, accs, 0)])
        rings.adding[0].release(used * len(accs))
        accs = add_others(ds, rings.adding[0], used, (first,) + accs[1:])  # noqa: RUF005
    store_own(accs, rings, grid, 0)


@gluon.jit
def dscores_step(rings, used, dp, accs, grid, HAS_NEXT: gl.constexpr):
    """Adds a step's share to the follower's chunks; returns the next step's dprobs too, if it HAS_NEXT."""
    AHEAD: gl.constexpr = min(grid.tiles.CHUNKS_V, rings.held_v.parts)
    delta = rings.rows.at(rows_use(used, grid)).slice(1, 1)
    rings.rows.wait(rows_use(used, grid))
    rings.probs.wait(used)
    factor = rings.probs.at(used).load(dp.type.layout).to(gl.float32)
    INVERSE_SCALE: gl.constexpr = 1 / probs_scale(rings.probs.buffers.dtype)
    ds = factor * (dp * INVERSE_SCALE - delta.load(dp.type.layout) * INVERSE_SCALE)
    rings.probs.release(used)
    rings.dscores.claim(used)
    rings.dscores.at(used).store(ds.to(rings.passing.buffers.dtype))
    fence_async_shared()
    rings.dscores.publish(used)
    if grid.tiles.OF != "q":
        rings.rows.release(used)
    rings.dscores.wait(used)
    operand = dscores_operand(rings.dscores.at(used), grid)
    first = start_own(operand, rings.adding[1], used, accs, 0)
    if HAS_NEXT:
        dp = start_sum(rings.held_v, rings.passing_v, used + 1, score_zeros(grid), grid, 0, AHEAD)
    first = warpgroup_mma_wait(AHEAD if HAS_NEXT else 0, deps=[first])
    rings.adding[1].release(used * len(accs))
    if HAS_NEXT:
        dp = finish_sum(dp, rings.held_v, rings.passing_v, used + 1, grid, AHEAD, 0)
    accs = add_others(operand, rings.adding[1], used, (first,) + accs[1:])  # noqa: RUF005
    rings.dscores.release(used)
    return dp, accs


@gluon.jit
def follower(rings, grid):
    """The warpgroup that computes the gradients of scores, and the other chunks of dq or dk."""
    AHEAD: gl.constexpr = min(grid.tiles.CHUNKS_V, rings.held_v.parts)
    records = rings.tile
    accs = own_zeros(grid, 1)
    records.ring.wait(0)
    steps = num_steps(records, grid)
    used = 0
    if steps > 0:
        rings.held_v.wait(0)
        dp = start_sum(rings.held_v, rings.passing_v, 0, score_zeros(grid), grid, 0, AHEAD)
        dp = finish_sum(dp, rings.held_v, rings.passing_v, 0, grid, AHEAD, 0)
        while used + 1 < steps:
            dp, accs = dscores_step(rings, used, dp, accs, grid, True)
            used += 1
        dp, accs = dscores_step(rings, used, dp, accs, grid, False)
    store_own(accs, rings, grid, 1)


@gluon.jit
def value_scorer(rings, grid, mod):
    """The warpgroup that computes the probabilities for a tile of dv, one step ahead of its chunks of the gradient."""
    AHEAD: gl.constexpr = min(grid.tiles.CHUNKS, rings.held.parts)
    records = rings.tile
    zeros = score_zeros(grid)
    accs = own_zeros(grid, 0)
    records.ring.wait(0)
    steps = num_steps(records, grid)
    step = first_step(records, grid)
    used = 0
    if steps > 0:
        rings.held.wait(0)
        s = start_sum(rings.held, rings.passing, 0, zeros, grid, 0, AHEAD)
        s = finish_sum(s, rings.held, rings.passing, 0, grid, AHEAD, 0)
        hand_probabilities(s, rings, step, 0, grid, mod)
    while used + 1 < steps:
        step = next_step(step, records, grid)
        s = start_sum(rings.held, rings.passing, used + 1, zeros, grid, 0, AHEAD)
        rings.probs.wait(used)
        accs = add_own(rings.probs.at(used), rings.adding[0], used, accs)
        s = finish_sum(s, rings.held, rings.passing, used + 1, grid, AHEAD, len(accs))
        hand_probabilities(s, rings, step, used + 1, grid, mod)
        accs = finish_own(accs, rings.adding[0], used)
        rings.probs.release(used)
        used += 1
    if steps > 0:
        rings.probs.wait(used)
        accs = add_own(rings.probs.at(used), rings.adding[0], used, accs)
        accs = wait_for_products(accs)
    store_own(accs, rings, grid, 0)


@gluon.jit
def hand_probabilities(s, rings, step, used, grid, mod):
    """Leaves a step's probabilities for the products with dout."""
    rings.rows.wait(used)
    p, _ = score(s, rings, step, used, grid, mod)
    rings.probs.claim(used)
    rings.probs.at(used).store(p.to(rings.passing.buffers.dtype))
    fence_async_shared()
    rings.probs.publish(used)
    rings.rows.release(used)


@gluon.jit
def value_follower(rings, grid):
    """The warpgroup that computes the other chunks of dv."""
    records = rings.tile
    accs = own_zeros(grid, 1)
    records.ring.wait(0)
    steps = num_steps(records, grid)
    used = 0
    while used < steps:
        rings.probs.wait(used)
        accs = add_own(rings.probs.at(used), rings.adding[1], used, accs)
        accs = finish_own(accs, rings.adding[1], used)
        rings.probs.release(used)
        used += 1
    store_own(accs, rings, grid, 1)


@gluon.jit
def store_own(accs, rings, grid, WARPGROUP: gl.constexpr):
    """Stores a warpgroup's chunks of the gradient, if there is a tile.

    Each chunk is stored from the buffer of the same chunk in the last step.
    """
    records = rings.tile
    if grid.gradients.scale is not None:
        accs = scale_by(accs, grid.gradients.scale)
    if records.get(0, "is_tile") > 0:
        rows = out_rows(records, grid)
        last = gl.maximum(num_steps(records, grid) - 1, 0) * len(accs)
        for i in gl.static_range(len(accs)):
            buffer = rings.adding[WARPGROUP].at(last + i)
            store_chunk(accs[i], buffer, rows, records.get(0, "place"), grid, WARPGROUP + 2 * i)
        tma_store_wait(0)


@gluon.jit
def store_chunk(acc, buffer, rows, place, grid, CHUNK: gl.constexpr):
    """Starts the stores of a chunk, box by box, from a buffer that it fills twice if it is float32."""
    out = grid.gradients.out
    WIDTH: gl.constexpr = out.block_type.shape[4 if grid.call.q.PACKED else 3]
    COLS: gl.constexpr = buffer.shape[1]
    BOXES: gl.constexpr = COLS // BOX
    parts = pieces(acc.to(out.dtype), WIDTH)
    for i in gl.static_range(len(parts)):
        if i % BOXES == 0:
            # The store before may have used the same buffer.
            tma_store_wait(0)
        box = box_of(buffer, i % BOXES * BOX, BOX)
        as_tile(box, out.dtype, WIDTH).store(parts[i])
        fence_async_shared()
        tma_put(out, rows.at(place, CHUNK * COLS + i * WIDTH), as_box(box, out), grid.gradients.ADDS)
