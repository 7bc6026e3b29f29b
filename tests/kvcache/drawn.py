"""Random cached calls for hypothesis: any combination of what a call may have."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.kvcache.cases import CacheCase

_LAYOUTS = ("apart", "heads_first", "stacked", "heads_first_stacked", "between", "sliced")


@st.composite
def cases(draw: st.DrawFn, longest: int = 70, head_dims: tuple[int, ...] = (8, 16, 20, 33, 64)) -> CacheCase:
    """A case with sequences of up to ``longest`` keys in the cache and up to half of that in the call."""

    def chance(share: float = 0.3) -> bool:
        return draw(st.floats(0, 1)) < share

    batch, packed, appends = draw(st.integers(1, 4)), chance(), chance(0.5)
    packed_new = appends and (packed or chance(0.2))

    def count(most: int) -> int:
        return draw(st.sampled_from([0, 1, 1, most, draw(st.integers(0, most))]))

    rows, new = count(longest // 2), count(longest // 2) if appends else 0
    same = chance(0.6)
    sequences = []
    for _ in range(batch):
        queries = count(longest // 2) if packed else rows
        added = 0 if not appends else queries if same and packed_new and packed else new
        added = count(longest // 2) if packed_new and not same else added
        sequences.append((count(longest), queries, added))
    paged, float8 = chance(0.5), draw(st.sampled_from(["", "", "none", "h", "eh"]))
    kv_heads = draw(st.sampled_from([1, 1, 2, 3]))
    head_dim = draw(st.sampled_from(head_dims))
    head_dim_v = draw(st.sampled_from([None, None, *head_dims]))
    layout = draw(st.sampled_from(_LAYOUTS))
    leftpad = [draw(st.integers(0, max(1, old + 2))) for old, _, _ in sequences] if chance() else []
    window = draw(st.sampled_from([None, None, (3, 0), (17, 4), (-1, 2), (0, 0), (40, -1)]))
    rotary = draw(st.integers(1, head_dim // 2)) * 2 if appends and chance(0.5) else 0
    return CacheCase(
        "drawn",
        tuple(sequences),
        packed=packed,
        packed_new=packed_new,
        say_longest=chance(0.5),
        spare=draw(st.integers(0, 2)) if packed or packed_new else 0,
        appends=appends,
        heads=kv_heads * draw(st.sampled_from([1, 1, 2, 5, 8])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=None if layout == "between" else head_dim_v,
        page_size=draw(st.sampled_from([1, 2, 3, 7, 16, 64, 256])) if paged else 0,
        entries=not paged and chance(),
        leftpad=tuple(leftpad),
        rotary=rotary,
        interleaved=bool(rotary) and chance(0.5),
        tables=chance(0.5),
        rotary_start=bool(rotary) and chance(),
        float8=float8,
        layout=layout,
        causal=chance(0.7),
        window=window,
        scale=draw(st.sampled_from([None, None, 0.2])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        alibi=draw(st.sampled_from(["", "", "h", "bh"])),
        sinks=chance(),
        out=draw(st.sampled_from(["", "", "whole", "part"])),
    )
