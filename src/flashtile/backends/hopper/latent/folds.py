"""How a tile that several programs have parts of is put together: states in memory, and who folds them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.decode import work
from flashtile.backends.gpu.decode.kernel import TilePlace, finish
from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.device.gluon_compat import thread_barrier
from flashtile.backends.hopper.device.parts import append

# Bits of a half tile's first counter for the number of stored states; bits above are for those who do not wait.
STATE_BITS = gl.constexpr(8)


@gluon.jit
def end_part(accs, row_max, row_sum, records, parts, call, latent, HALF: gl.constexpr):
    """Finishes a tile that one program has; else stores the part's state, and folds the tile's if it is the last."""
    first, num_rows = records.get(parts, "first"), records.get(parts, "num_rows")
    place = TilePlace(records.get(parts, "b"), 0, records.get(parts, "h_kv"), first)
    shape = work.SequenceWork(records.get(parts, "first_row"), num_rows, 0, records.get(parts, "high"), 0, 0, 0)
    row, count = gl.arange(0, 64, row_max.type.layout), num_rows * call.GROUP - first
    whole = records.get(parts, "num_states") == 1
    slot = slot_of(records.get(parts, "origin"), records.get(parts, "state"), latent)
    if whole:
        for i in gl.static_range(len(accs)):
            finish_piece(accs[i], row_max, row_sum, place, shape, i, call, latent, HALF)
    else:
        layout: gl.constexpr = accs[0].type.layout
        for i in gl.static_range(len(accs)):
            at, exists = state_of(slot, row, count, i, call, latent, HALF, layout)
            gl.store(at, accs[i], mask=exists)
        at, exists = call.results.stats + 4 * (slot + row) + 2 * HALF, row < count
        gl.store(at, row_max, mask=exists)
        gl.store(at + 1, row_sum, mask=exists)
        share_tile(accs, row_max, row_sum, records, parts, place, shape, gl.minimum(count, 64), call, latent, HALF)


@gluon.constexpr_function
def wide_rows(cols, dtype):
    """A layout of 64 rows in the threads that have them in an accumulator, 16 bytes of a row side by side in each."""
    own = 128 // dtype.primitive_bitwidth
    side, apart = own.bit_length() - 1, (cols // own).bit_length() - 3
    registers = [[0, 1 << bit] for bit in range(side)] + [[8, 0]] + [[0, 4 * own << bit] for bit in range(apart)]
    return gl.DistributedLinearLayout(
        registers, [[0, own], [0, 2 * own], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, cols]
    )


@gluon.jit
def finish_piece(acc, row_max, row_sum, place, shape, i: gl.constexpr, call, latent, HALF: gl.constexpr):
    """``finish``, of a summer's i-th piece."""
    layout: gl.constexpr = wide_rows(latent.PIECE, call.out.ptr.dtype.element_ty)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    col = latent.PIECE * (2 * i + HALF) + gl.arange(0, latent.PIECE, gl.SliceLayout(0, layout))[None, :]
    finish(
        gl.convert_layout(acc, layout), gl.convert_layout(row_max, rows), gl.convert_layout(row_sum, rows), place.b,
        place, place.first + gl.arange(0, 64, rows), col, shape, call, HALF + i == 0,
    )  # fmt: skip


@gluon.jit
def state_of(slot, row, count, i: gl.constexpr, call, latent, HALF: gl.constexpr, layout: gl.constexpr):
    """(Addresses, which exist) of a summer's i-th piece of the state from ``slot`` on, of ``count`` rows."""
    col = latent.PIECE * (2 * i + HALF) + gl.arange(0, latent.PIECE, gl.SliceLayout(0, layout))
    return call.results.acc + (slot + row).to(gl.int64)[:, None] * call.out.DIM + col[None, :], (row < count)[:, None]


@gluon.jit
def slot_of(origin, state, latent):
    """The first row's slot of a state of a tile that program ``origin`` has the first part of.

    A program ends with the first part of a tile that it shares, and begins with another part of one.
    """
    return 64 * (2 * (origin + state * latent.LANES) + (state == 0).to(gl.int32))


@gluon.jit
def share_tile(accs, row_max, row_sum, records, parts, place, shape, count, call, latent, HALF: gl.constexpr):
    """Finishes a half of a tile of several states once all have been stored, some rows and columns after others.

    Where two programs fold two states, each finishes every second piece of its own, to which it adds the other's.
    Programs with nothing else to do wait to help, for a bounded time: others may not be resident.
    """
    origin, num_states = records.get(parts, "origin"), records.get(parts, "num_states")
    counter = call.results.counters + 4 * origin + 2 * HALF
    helps = (records.get(parts, "waits") > 0) & (num_states * count * call.out.DIM >= 16384)
    rank, step = arrive(counter, records.get(parts, "state"), num_states, helps, call.schedule.PATIENCE)
    if step > 0:
        # Fewer rows are in few of a summer's warps.
        if (num_states == 2) & (step == 2) & (count > 32):
            for i in gl.static_range(len(accs)):
                if i % 2 == rank:
                    fold_pair(accs[i], row_max, row_sum, i, origin, place, shape, count, call, latent, HALF)
        # So that as many have a share as fold: shares of one program follow one another.
        elif 2 * num_states < count:
            fold_shares(rank, step, origin, num_states, place, shape, count, call, latent, HALF, 16, 4)
        elif num_states <= 16:
            fold_shares(rank, step, origin, num_states, place, shape, count, call, latent, HALF, 4, 8)
        else:
            fold_rows(rank, step, origin, num_states, place, shape, count, call, latent, HALF)


@gluon.jit
def arrive(counter, member, goal, helps, PATIENCE: gl.constexpr):
    """Counts a stored state; says which share of the fold is the caller's, once all are stored.

    All members fold, or all but the last, which may have other work. If another does not wait, or no longer when the
    last state is stored, then who stored that folds alone.

    Args:
        counter: Counts stored states and those who do not wait. The one after it holds an epoch and how it ended:
            whether one folds alone, and whether the last member waits.
        member: The caller's state.
        goal: States, at most 255.
        helps: Whether the caller would wait.
        PATIENCE: How often it looks; 0 for never.

    Returns:
        The caller's number among those who fold, and how many they are; 0 if the caller is none of them.
    """
    ALL: gl.constexpr = 2**STATE_BITS - 1
    AWAY: gl.constexpr = 2**STATE_BITS
    LAST_AWAY: gl.constexpr = 2 ** (2 * STATE_BITS)
    waits = helps & (PATIENCE > 0)
    before = gl.load(counter + 1, volatile=True)
    # All threads have stored before one of them says so.
    thread_barrier()
    own = 1 + gl.where(waits, 0, gl.where(member == goal - 1, LAST_AWAY, AWAY))
    word, end = gl.atomic_add(counter, own, sem="acq_rel") + own, before
    is_last = (word & ALL) == goal
    if is_last:
        gl.atomic_xchg(counter, 0, sem="relaxed")
        alone = (word & (LAST_AWAY - 1)) >= AWAY
        end = (((before >> 2) + 1) & 0xFFFF) * 4 + alone.to(gl.int32) * 2 + (word >= LAST_AWAY).to(gl.int32)
        gl.atomic_xchg(counter + 1, end, sem="release")
    polls = 0
    while waits & (end == before):
        end = gl.atomic_add(counter + 1, 0, sem="acquire")
        polls += 1
        if (polls >= PATIENCE) & (end == before):
            # Who has stored the last state relies on those who wait, and has zeroed the counter.
            word = gl.atomic_add(counter, 0, sem="relaxed")
            if (word & ALL) > 0:
                waits = gl.atomic_cas(counter, word, word + AWAY, sem="relaxed") != word
    step = goal - (end & 1)
    rank, step = member, gl.where(member < step, step, 0)
    alone = (end & 2) > 0
    rank, step = gl.where(alone, 0, rank), gl.where(alone, is_last.to(gl.int32), step)
    return rank, gl.where(end == before, 0, step)


@gluon.jit
def fold_pair(acc, row_max, row_sum, i: gl.constexpr, origin, place, shape, count, call, latent,
              HALF: gl.constexpr):  # fmt: skip
    """Finishes the i-th piece of a half of a tile of two states, given the (i % 2)-th, as ``fold`` would."""
    slot = slot_of(origin, gl.to_tensor(1 - i % 2), latent)
    row = gl.arange(0, 64, row_max.type.layout)
    layout: gl.constexpr = acc.type.layout
    at, exists = state_of(slot, row, count, i, call, latent, HALF, layout)
    other = gl.load(at, mask=exists, other=0.0, cache_modifier=".cg")
    stats, has = call.results.stats + 4 * (slot + row) + 2 * HALF, row < count
    other_max = gl.load(stats, mask=has, other=float("-inf"), cache_modifier=".cg")
    other_sum = gl.load(stats + 1, mask=has, other=0.0, cache_modifier=".cg")
    top = gl.maximum(row_max, other_max)
    finite_max = softmax.made_finite(top)
    first, second = gl.exp2(row_max - finite_max), gl.exp2(other_max - finite_max)
    if i % 2 == 0:
        acc = gl.fma(other, second[:, None], acc * first[:, None])
        row_sum = gl.fma(other_sum, second, row_sum * first)
    else:
        acc = gl.fma(acc, first[:, None], other * second[:, None])
        row_sum = gl.fma(row_sum, first, other_sum * second)
    finish_piece(acc, top, row_sum, place, shape, i, call, latent, HALF)


@gluon.jit
def fold_rows(rank, step, origin, num_states, place, shape, count, call, latent, HALF: gl.constexpr):
    """Finishes every ``step``-th row by 128 columns of a half of a tile, from ``rank`` on, 64 states at once.

    .cg bypasses L1, which may be stale.
    """
    PIECE: gl.constexpr = latent.PIECE
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    of_states: gl.constexpr = gl.SliceLayout(1, layout)
    for share in range(rank, 2 * count, step):
        # Every second piece is of this half.
        first_col = share % 2 * 128
        first_col += (first_col // PIECE + HALF) * PIECE
        col = first_col + gl.arange(0, 128, gl.SliceLayout(0, layout))
        row_max, row_sum = gl.full([1], float("-inf"), gl.float32, of_states), gl.zeros([1], gl.float32, of_states)
        acc = gl.zeros([1, 128], gl.float32, layout)
        for start in range(0, num_states, 64):
            state = start + gl.arange(0, 64, of_states)
            slot, has = slot_of(origin, state, latent) + share // 2, state < num_states
            stats = call.results.stats + 4 * slot + 2 * HALF
            tops = gl.load(stats, mask=has, other=float("-inf"), cache_modifier=".cg")
            sums = gl.load(stats + 1, mask=has, other=0.0, cache_modifier=".cg")
            at = call.results.acc + slot.to(gl.int64)[:, None] * call.out.DIM + col[None, :]
            parts = gl.load(at, mask=has[:, None], other=0.0, cache_modifier=".cg")
            top = gl.maximum(row_max, gl.max(tops, 0))
            finite_max = softmax.made_finite(top)
            weight = gl.exp2(row_max - finite_max)
            weights = gl.exp2(tops - gl.max(finite_max, 0))
            acc = acc * weight[:, None] + gl.sum(parts * weights[:, None], 0)[None, :]
            row_max, row_sum = top, row_sum * weight + gl.sum(sums * weights, 0)
        row = share // 2 + gl.arange(0, 1, of_states)
        finish(acc, row_max, row_sum, place.b, place, place.first + row, col[None, :], shape, call, first_col == 0)


@gluon.jit
def fold_shares(rank, step, origin, num_states, place, shape, count, call, latent, HALF: gl.constexpr,
                ROWS: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """Finishes every ``step``-th ROWS by 128 columns of a half of a tile, from ``rank`` on."""
    PIECE: gl.constexpr = latent.PIECE
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    for share in range(rank, (count + ROWS - 1) // ROWS * 2, step):
        # Every second piece is of this half.
        first_col = share % 2 * 128
        first_col += (first_col // PIECE + HALF) * PIECE
        row = share // 2 * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        col = first_col + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
        acc, row_max, row_sum = fold(row, col, origin, num_states, count, call, latent, HALF, AHEAD)
        finish(acc, row_max, row_sum, place.b, place, place.first + row, col, shape, call, first_col == 0)


@gluon.jit
def fold(row, col, origin, num_states, count, call, latent, HALF: gl.constexpr, AHEAD: gl.constexpr):
    """The fold of some rows and columns of a tile's states in their order; AHEAD states are loaded at once.

    A loop: to fetch instructions that run once takes as long as to load numbers. .cg bypasses L1, which may be stale.
    """
    PITCH: gl.constexpr = 128 * latent.LANES
    acc = gl.zeros([row.shape[0], col.shape[1]], gl.float32, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
    of_rows: gl.constexpr = row.type.layout
    row_max = gl.full([row.shape[0]], float("-inf"), gl.float32, of_rows)
    row_sum = gl.full([row.shape[0]], 0.0, gl.float32, of_rows)
    for start in range(0, num_states, AHEAD):
        # What follows a tile's first state is as if there were another before it.
        others = slot_of(origin, gl.to_tensor(start + 1), latent) - PITCH + row
        parts, tops, sums, top = (), (), (), row_max
        for i in gl.static_range(AHEAD):
            slot = others + i * PITCH
            if i == 0:
                slot = slot_of(origin, gl.to_tensor(start), latent) + row
            has = (row < count) & (start + i < num_states)
            at = call.results.acc + slot.to(gl.int64)[:, None] * call.out.DIM + col
            stats = call.results.stats + 4 * slot + 2 * HALF
            parts = append(parts, gl.load(at, mask=has[:, None], other=0.0, cache_modifier=".cg"))
            tops = append(tops, gl.load(stats, mask=has, other=float("-inf"), cache_modifier=".cg"))
            sums = append(sums, gl.load(stats + 1, mask=has, other=0.0, cache_modifier=".cg"))
        for i in gl.static_range(AHEAD):
            top = gl.maximum(top, tops[i])
        finite_max = softmax.made_finite(top)
        weight = gl.exp2(row_max - finite_max)
        acc, row_sum, row_max = acc * weight[:, None], row_sum * weight, top
        for i in gl.static_range(AHEAD):
            weight = gl.exp2(tops[i] - finite_max)
            acc, row_sum = gl.fma(parts[i], weight[:, None], acc), gl.fma(sums[i], weight, row_sum)
    return acc, row_max, row_sum
