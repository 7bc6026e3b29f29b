"""The balanced tile order deals out every tile once, and evenly."""

import pytest
import torch
import triton
import triton.language as tl

from flashtile.backends.gpu.device.tiles import longest_first_by_spans, paired


@triton.jit
def _deal(out_ptr, num_programs, num_blocks, num_heads, STEPS: tl.constexpr):
    program = tl.program_id(0)
    for step in range(STEPS):
        block, head, is_tile, is_end = paired(step, program, num_programs, num_blocks, num_heads)
        at = out_ptr + (program * STEPS + step) * 4
        tl.store(at, block)
        tl.store(at + 1, head)
        tl.store(at + 2, is_tile.to(tl.int32))
        tl.store(at + 3, is_end.to(tl.int32))


def _dealt(num_programs: int, num_blocks: int, num_heads: int) -> list[list[tuple[int, int]]]:
    """(block, head) of each program's tiles in order."""
    steps = 2 * (num_blocks + 1) * (num_heads + 1) // num_programs + 6
    out = torch.full((num_programs, steps, 4), -1, dtype=torch.int32)
    _deal[(num_programs,)](out, num_programs, num_blocks, num_heads, STEPS=steps)
    tiles = []
    for program in out.tolist():
        ends = [is_end for *_, is_end in program]
        assert ends == sorted(ends) and ends[-1] == 1
        tiles.append([(block, head) for block, head, is_tile, is_end in program if is_tile and not is_end])
    return tiles


@pytest.mark.parametrize(
    ("num_programs", "num_blocks", "num_heads"),
    [(1, 1, 1), (4, 1, 9), (4, 3, 5), (3, 4, 7), (7, 5, 3), (6, 2, 20), (2, 9, 1), (11, 7, 4)],
)
def test_every_tile_once(num_programs: int, num_blocks: int, num_heads: int) -> None:
    dealt = [tile for program in _dealt(num_programs, num_blocks, num_heads) for tile in program]
    assert sorted(dealt) == [(block, head) for block in range(num_blocks) for head in range(num_heads)]


@triton.jit
def _rank(out_ptr, num_blocks, num_heads, most, num_programs):
    place = tl.program_id(0)
    block, head = longest_first_by_spans(place, num_blocks, num_heads, most, num_programs)
    tl.store(out_ptr + 2 * place, block)
    tl.store(out_ptr + 2 * place + 1, head)


@pytest.mark.parametrize(
    ("num_blocks", "num_heads", "most", "num_programs", "spans"),
    [
        (1, 1, 1, 1, [1]),
        (4, 23, 9, 12, [6, 6, 6, 5]),  # two tiles a program
        (4, 23, 9, 16, [8, 8, 7]),
        (3, 9, 2, 99, [2, 2, 2, 2, 1]),  # as many as the cache holds
        (5, 17, 99, 10, [2, 2, 2, 2, 2, 7]),  # one tile a program, at last four
        (7, 3, 99, 2, [1, 1, 1]),
        (5, 4, 99, 99, [4]),
    ],
)
def test_spans_of_heads_longest_first(
    num_blocks: int, num_heads: int, most: int, num_programs: int, spans: list[int]
) -> None:
    out = torch.full((num_blocks * num_heads, 2), -1, dtype=torch.int32)
    _rank[(num_blocks * num_heads,)](out, num_blocks, num_heads, most, num_programs)
    firsts = [sum(spans[:n]) for n in range(len(spans))]
    expected = [
        (block, head)
        for first, span in zip(firsts, spans, strict=True)
        for block in reversed(range(num_blocks))
        for head in range(first, first + span)
    ]
    assert [(block, head) for block, head in out.tolist()] == expected


@pytest.mark.parametrize(("num_blocks", "num_heads"), [(8, 12), (7, 12), (3, 30)])
def test_programs_get_the_same_work(num_blocks: int, num_heads: int) -> None:
    num_programs = 6
    work = [sum(block + 1 for block, _ in program) for program in _dealt(num_programs, num_blocks, num_heads)]
    mean = num_heads * num_blocks * (num_blocks + 1) / 2 / num_programs
    assert max(work) <= mean * 1.06
