"""One seeded generator of calls over everything that the API takes, as the frozen records of the case tables.

A call is data: the same record makes tensors with keywords (``judged``) and launches on the meta device (``launches``).
Calls with functions of the user's, which are no data, are drawn in ``test_mods`` from the same plain calls.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from flashtile.call.cached_arguments import MOST_TREE_ROWS
from tests.cases import Case
from tests.intervals import KINDS as INTERVALS
from tests.kvcache.cases import CacheCase
from tests.quantization.cases import QuantizedCase
from tests.quantization.quantizer import Case as QuantizerCase
from tests.trees import KINDS as TREES

T = TypeVar("T")
# plain: dense and packed calls, with gradients; latent: cached ones with queries of the values; pieces: the calls of
# ranks; quantizer: what makes 8 bits of tensors.
Kind = Literal["plain", "cached", "latent", "quantized", "quantizer", "pieces"]
KINDS: tuple[Kind, ...] = ("plain", "plain", "plain", "cached", "cached", "quantized", "quantizer", "pieces", "latent")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Sizes:
    """How large calls may be.

    Attributes:
        longest: Rows of a sequence.
        most_pairs: Queries times keys of all heads together, which a reference computes in float64.
        most_dim: Largest head_dim.
        odd_dims: Whether head_dims may be no multiples of 8.
        big_dim: Largest head_dim of one plain call in ten, past 256; 0 for none.
    """

    longest: int = 150
    most_pairs: int = 2**21
    most_dim: int = 256
    odd_dims: bool = True
    big_dim: int = 512


SMALL, LONG = Sizes(), Sizes(1500, 2**25)
# For builds, which have no data: strides of more than 32 bits are among them.
ENDLESS = Sizes(2**20, 2**62)


@dataclass(frozen=True)
class Pieces:
    """What ranks make of a call.

    Attributes:
        cuts: Keys counted from each sequence's end at which it is cut, as in ``tests.partials``.
        deterministic: Whether sums must be repeatable.
        origins: Whether sequences are parts of longer ones with dropout, with ALiBi: "d", "a" or "da"; "" for neither.
    """

    cuts: tuple[int, ...] = (1,)
    deterministic: bool = False
    origins: str = ""


@dataclass(frozen=True)
class Drawn:
    """One call: ``case`` is a record of the tables, ``dtype`` that of its tensors, of q for 8-bit caches.

    ``maxima``: whether it returns the largest scores.
    """

    seed: int
    kind: Kind
    case: Case | CacheCase | QuantizedCase | QuantizerCase
    dtype: torch.dtype = torch.bfloat16
    pieces: Pieces | None = None
    maxima: bool = False


class Draw:
    """Numbers from a seed, the same on every version of Python."""

    def __init__(self, seed: object, sizes: Sizes) -> None:
        self.sizes, self._random = sizes, random.Random(repr(seed))

    def chance(self, share: float = 0.3) -> bool:
        return self._random.random() < share

    def pick(self, *values: T) -> T:
        return self._random.choice(values)

    def upto(self, most: int, least: int = 0) -> int:
        return self._random.randint(least, max(least, most))

    def length(self, most: int) -> int:
        """Of 0 and 1, primes, both sides of blocks' ends, and any; 0 more seldom, since nothing is launched for it."""
        block = self.pick(8, 16, 32, 64, 128) * self.upto(max(most // 64, 1), 1) + self.pick(-1, 0, 0, 1)
        if self.chance(0.04):
            return 0
        primes = (2, 3, 7, 17, 61, 127, 521, 1021, 8191, 131071)
        return min(
            self.pick(1, self.pick(*primes), block, block, self.upto(min(most, 300), 1), self.upto(most, 1)), most
        )

    def head_dim(self) -> int:
        """Widths of tiles and what lies beside them, multiples of 8 and any."""
        most = self.sizes.most_dim
        edge = self.pick(16, 32, 64, 80, 96, 128, 160, 192, 256)
        dim = self.pick(edge, edge, edge - 8, edge + 8, 8 * self.upto(most // 8, 1))
        if self.sizes.odd_dims and self.chance(0.2):
            dim = self.pick(edge - 1, edge + 1, self.upto(most, 1))
        return min(max(dim, 1), most)

    def head_dims(self) -> tuple[int, int | None]:
        """head_dim and, if it is another, head_dim_v."""
        pair = (self.head_dim(), self.head_dim() if self.chance(0.25) else None)
        return (192, 128) if self.sizes.most_dim >= 192 and self.chance(0.05) else pair

    def big_dims(self, small: int) -> dict[str, int]:
        """Of one call in ten head_dim and head_dim_v, of which one may be as ``small`` as it was."""
        if not self.sizes.big_dim or not self.chance(0.1):
            return {}
        big = min(self.pick(264, 320, 384, 448, 512, 512, 8 * self.upto(64, 33)), self.sizes.big_dim)
        dims = self.pick((big, big), (big, big), (big, small), (small, big))
        return {"head_dim": dims[0], "head_dim_v": dims[1]}

    def heads(self) -> dict[str, int]:
        """Query heads and key heads."""
        kv_heads = self.pick(1, 1, 2, 3, 8)
        return {"heads": kv_heads * self.pick(1, 1, 2, 3, 4, 5, 8, 16, 71), "kv_heads": kv_heads}

    def band(self) -> dict[str, Any]:
        """Causal and window masks, some that keep nothing."""
        bound = [None, -1, 0, 1, 63, 64, 128, self.upto(self.sizes.longest)]
        window = (self.pick(*bound), self.pick(*bound)) if self.chance() else None
        return {"causal": self.chance(0.5), "window": window}

    def chunk(self) -> int:
        """Keys of a chunk: as many as a tile has, more and fewer, sometimes more than there are."""
        return self.pick(1, 16, 63, 64, 128, 130, self.upto(self.sizes.longest, 1), 10**9)

    def scores(self) -> dict[str, Any]:
        """Scale and softcap."""
        return {
            "scale": self.pick(None, None, None, None, 0.2, 1.0, -0.1, 0.0),
            "softcap": self.pick(0.5, 3.0, 20.0) if self.chance(0.2) else 0.0,
        }


def draw(seed: int, sizes: Sizes = SMALL, kind: Kind | None = None) -> Drawn:
    """Call number ``seed`` of an endless list; with a kind, of that kind's."""
    d = Draw((seed, kind), sizes)
    chosen = kind or d.pick(*KINDS)
    dtype = d.pick(*FLOATS[:2], *FLOATS)
    if chosen == "pieces":
        return _pieces(d, seed, dtype)
    makers = {"plain": _plain, "cached": _cached, "latent": _latent, "quantized": _quantized, "quantizer": _quantizer}
    case = _within(makers[chosen](d, f"{chosen}_{seed}"), sizes)
    dtype = torch.bfloat16 if getattr(case, "float8", "") == "rows" else dtype
    return Drawn(seed, chosen, case, dtype, maxima=chosen in ("plain", "cached", "latent") and d.chance(0.2))


def _plain(d: Draw, name: str) -> Case:
    (head_dim, head_dim_v), packed = d.head_dims(), d.chance(0.4)
    batch = d.upto(3, 1)
    # Short packed sequences have a backward of their own.
    most = min(64, d.sizes.longest) if packed and d.chance(0.4) else d.sizes.longest
    sides = tuple((d.length(most), d.length(most)) for _ in range(batch)) if packed else ()
    seqlen_q, seqlen_k = d.length(most), d.length(most)
    if d.chance(0.4):
        seqlen_k, sides = seqlen_q, tuple((n, n) for n, _ in sides)
    dims = [x for x in "bhqk" if d.chance(0.6)]
    leaves = [x for x in "qkvbs" if d.chance()]
    has_pairs = d.chance(0.35) and not (packed and most > 10**4)
    case = Case(
        f"varlen_{name}" if packed else name,
        batch=batch,
        seqlen_q=0 if packed else seqlen_q,
        seqlen_k=0 if packed else seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        lengths=sides,
        spare=d.pick(0, 0, 1, 7) if packed else 0,
        say_longest=d.chance(0.5),
        mask=d.pick("".join(dims), "bhqk", "qk", "none") if has_pairs and d.chance(0.5) else None,
        bias=d.pick("".join(x for x in "bhqk" if d.chance(0.6)), "hqk", "hqk") if has_pairs and d.chance(0.7) else None,
        bias_grad=d.chance(0.6),
        bias_float=d.chance(0.2),
        trimmed=d.chance(),
        alibi=d.pick("h", "bh") if d.chance(0.2) else "",
        sinks=d.chance(0.25),
        dropout=d.pick(0.1, 0.5) if d.chance(0.15) else 0.0,
        layout=d.pick(*["contiguous"] * 3, "transposed", "expanded", "sliced", "last_dim_strided", "packed")
        if not packed
        else d.pick("contiguous", "contiguous", "sliced"),
        lse_grad=d.chance(0.2),
        deterministic=d.chance(0.3),
        wanted="".join(leaves) if d.chance(0.35) else None,
        dout=d.pick("contiguous", "contiguous", "expanded", "transposed", "sliced"),
        **d.heads(),
        **d.band(),
        **d.scores(),
    )
    case = replace(case, chunk=d.chunk() if d.chance(0.2) else None)
    case = replace(case, intervals=d.pick(*INTERVALS) if d.chance(0.2) else "")
    case = replace(case, **d.big_dims(head_dim))
    if case.bias is not None and d.chance(0.4):
        case = replace(case, large=d.pick("min", "min", "max", "-1e9", "-3e5"))
    # By numbers of its own, as what a seed meant before it still does. GPUs refuse a bias beside it.
    may_own = packed and not case.dropout and case.bias is None
    case = replace(case, invariant=may_own and Draw(("own bits", name), d.sizes).chance(0.2))
    if packed and Draw(("simple", name), d.sizes).chance(0.15):
        # What takes no more registers and buffers has kernels of its own.
        case = replace(
            case, head_dim=min(head_dim, 64), head_dim_v=min(head_dim_v or head_dim, 64), kv_heads=case.heads,
            window=None, softcap=0.0, alibi="", dropout=0.0, mask=None, bias=None, bias_grad=False,
            bias_float=False, trimmed=False, large="", chunk=None, intervals="",
        )  # fmt: skip
    return replace(case, out=d.pick("whole", "part"), wanted="") if packed and d.chance(0.1) else case


def _pieces(d: Draw, seed: int, dtype: torch.dtype) -> Drawn:
    """A call of which ``tests.partials`` can cut the keys, or whose rows are parts of others."""
    case = _within(_plain(d, f"pieces_{seed}"), d.sizes)
    packed = bool(case.lengths)
    longest = max([case.seqlen_k, *(k for _, k in case.lengths)])
    cuts = sorted({d.upto(longest - 1, 1) for _ in range(d.upto(3, 1))} if longest > 1 else set(), reverse=True)
    case = replace(
        case,
        mask=None if case.mask is None or packed else d.pick("bqk", "hqk", "qk"),
        bias=None if case.bias is None or packed else d.pick("bhqk", "hk", "hqk"),
        bias_grad=False, trimmed=False, alibi="h" if case.alibi and not packed else "", dropout=0.0, wanted=None,
        chunk=None, intervals="", out="", deterministic=False, invariant=False, bias_float=False, layout="contiguous",
        sinks=case.sinks and len(cuts) > 0,
        # Sums over more rows, cut elsewhere, differ in more than their last bits.
        heads=case.kv_heads * min(case.heads // case.kv_heads, 4),
        scale=None if case.scale in (0.2, 1.0) else case.scale,
        # Where pieces have slopes as a bias, they are added to it, and not before it.
        large="" if case.alibi else case.large,
        dout="contiguous", seqlen_q=case.seqlen_q or int(not packed), seqlen_k=case.seqlen_k or int(not packed),
    )  # fmt: skip
    origins = d.pick("d", "a", "da") if d.chance(0.2) else ""
    return Drawn(seed, "pieces", case, dtype, Pieces(tuple(cuts), d.chance(), origins))


def _cached(d: Draw, name: str) -> CacheCase:
    batch = d.pick(1, 1, 2, 3, 4, 40) if d.sizes.longest > 10**4 else d.upto(4, 1)
    packed, appends = d.chance(), d.chance(0.5)
    packed_new = appends and (packed or d.chance(0.2))
    # Of few keys nothing is ever split.
    longest = d.pick(*[d.sizes.longest] * 3, min(d.sizes.longest, 100))
    rows, new = d.pick(1, 1, d.upto(8), d.length(longest // 2)), d.pick(1, d.length(longest // 2)) if appends else 0
    same, sequences = d.chance(0.6), []
    for _ in range(batch):
        queries = d.pick(1, d.length(longest // 2)) if packed else rows
        added = 0 if not appends else queries if same and packed_new and packed else new
        added = d.length(longest // 2) if packed_new and not same else added
        sequences.append((d.length(longest), queries, added))
    paged, (head_dim, head_dim_v) = d.chance(0.5), d.head_dims()
    layout = d.pick("apart", "apart", "heads_first", "stacked", "heads_first_stacked", "between", "sliced")
    rotary = 2 * d.pick(d.upto(head_dim // 2, 1), head_dim // 2) if appends and head_dim > 1 and d.chance(0.5) else 0
    case = CacheCase(
        name,
        tuple(sequences),
        packed=packed,
        packed_new=packed_new,
        say_longest=d.chance(0.5),
        spare=d.upto(2) if packed or packed_new else 0,
        appends=appends,
        head_dim=head_dim,
        head_dim_v=None if layout == "between" else head_dim_v,
        page_size=d.pick(1, 2, 3, 7, 16, 16, 32, 64, 128, 256) if paged else 0,
        entries=not paged and d.chance(),
        leftpad=tuple(d.upto(old + 2) for old, _, _ in sequences) if d.chance() else (),
        rotary=rotary,
        interleaved=rotary > 0 and d.chance(0.5),
        tables=d.chance(0.5),
        rotary_start=rotary > 0 and d.chance(),
        float8=d.pick("", "", "", "none", "h", "eh"),
        layout=layout,
        alibi=d.pick("", "", "h", "bh"),
        sinks=d.chance(),
        out=d.pick("", "", "whole", "part"),
        **d.heads(),
        **d.band(),
        **d.scores(),
    )
    case = _with_trees(d, case) if d.chance(0.2) else case
    case = replace(case, slots=d.pick("own", "some", "anywhere")) if appends and d.chance() else case
    case = replace(case, ragged=d.pick("pages", "bound")) if paged and d.chance() else case
    case = replace(case, e5m2=True) if case.float8 and d.chance() else case
    case = replace(case, causal_each=True) if not case.tree and d.chance(0.2) else case
    case = replace(case, invariant=not case.float8 and Draw(("own bits", name), d.sizes).chance(0.2))
    return replace(case, chunk=d.chunk() if not case.tree and d.chance(0.2) else None)


def _latent(d: Draw, name: str) -> CacheCase:
    """A cached call with queries of the values, mostly one that the kernel over latent rows computes."""
    case = _cached(d, name)
    if d.chance(0.7):
        case = replace(
            case, window=None, softcap=0.0, alibi="", tree="", leftpad=(), chunk=None, scale=d.pick(None, 0.1),
            page_size=d.pick(1, 3, 8, 16, 32, 64, 128) if case.page_size else 0,
        )  # fmt: skip
    dims = (64, 512) if d.sizes.most_dim > 128 and d.chance(0.9) else (d.head_dim(), d.head_dim())
    if not (apart := d.chance(1 / 3)):
        case = replace(case, float8="", e5m2=False)
    case = replace(
        case, qv=True, heads=d.pick(1, 3, 9, 16, 40, 64, 128), kv_heads=1, head_dim=dims[0],
        head_dim_v=dims[1], rotary=min(case.rotary, dims[0] // 2 * 2), layout="apart" if apart else "stacked",
    )  # fmt: skip
    is_packed = dims == (64, 512) and not case.appends and d.chance(0.5)
    return replace(case, float8="rows", e5m2=False, layout="apart") if is_packed else case


def _with_trees(d: Draw, case: CacheCase) -> CacheCase:
    """The case with draft trees; packed, some sequences may have more rows than trees have."""
    most = 10**9 if case.packed else MOST_TREE_ROWS
    sequences = [(old, min(rows, most), new) for old, rows, new in case.sequences]
    if case.rotary:  # the new keys are the drafts
        sequences = [(old, rows, rows) for old, rows, _ in sequences]
    longest = min(max(rows for _, rows, _ in sequences), MOST_TREE_ROWS)
    return replace(
        case, sequences=tuple(sequences), causal=True, tree=d.pick(*TREES), words=d.chance(0.5),
        tree_rows=d.pick(longest, MOST_TREE_ROWS, d.upto(MOST_TREE_ROWS, 1)) if case.packed else 0,
    )  # fmt: skip


def _quantized(d: Draw, name: str) -> QuantizedCase:
    packed, most = d.chance(0.4), d.sizes.longest
    lengths = tuple((d.length(most), d.length(most)) for _ in range(d.upto(4, 1)))
    if d.chance():
        lengths = tuple((n, n) for n, _ in lengths)
    dims, scores, band = [_of_16(d), _of_16(d)], d.scores(), d.band()
    kinds = ("block", "block", "block", "head", "tensor")
    return QuantizedCase(
        name,
        lengths if packed else (lengths[0],) * len(lengths),
        packed=packed,
        spare=d.pick(0, 0, 1, 130) if packed else 0,
        say_longest=d.chance(0.5),
        head_dim=dims[0],
        head_dim_v=dims[1] if d.chance(0.25) else None,
        sinks=d.chance(),
        scales=(d.pick(*kinds), d.pick(*kinds), d.pick(*kinds)),
        shifted=not scores["softcap"] and d.chance(0.5),
        half=d.chance(0.5),
        **d.heads(),
        **(band | {"window": band["window"] or (None, None)}),
        **scores,
        out_scale=d.pick(0.01, 0.001) if d.chance() else None,
    )


def _quantizer(d: Draw, name: str) -> QuantizerCase:
    packed, most, heads = d.chance(0.4), d.sizes.longest, d.heads()
    lengths = tuple((d.length(most) or 1, d.length(most) or 1) for _ in range(d.upto(3, 1)))
    head_dim, rotary_dim = _of_16(d), 0
    if d.chance(0.5):
        # Positions are counted from the last key: no sequence may have more queries.
        rotary_dim, lengths = 2 * d.upto(head_dim // 2, 1), tuple((min(q, k), k) for q, k in lengths)
    return QuantizerCase(
        name,
        head_dim,
        _of_16(d),
        lengths if packed else (lengths[0],) * len(lengths),
        packed=packed,
        rotary_dim=rotary_dim,
        interleaved=rotary_dim > 0 and d.chance(0.5),
        scales=d.pick("block", "block", "head", "tensor"),
        rotate=d.chance(0.6),
        smooth_k=d.chance(0.6),
        heads=(heads["heads"], heads["kv_heads"]),
        seed=d.upto(99),
    )


def _of_16(d: Draw) -> int:
    return max(16, d.head_dim() // 16 * 16)


def _within(case: Any, sizes: Sizes) -> Any:
    """The case with fewer heads, and then shorter, until a reference can hold its pairs."""
    while _pairs(case) > sizes.most_pairs:
        heads = case.heads if isinstance(case.heads, tuple) else (case.heads, case.kv_heads)
        group = heads[0] // heads[1]
        fewer = (group, 1) if heads[1] > 1 else (-(-group // 2), 1)
        if fewer == heads:
            case = _shorter(case)
        else:
            changed = (
                {"heads": fewer}
                if isinstance(case.heads, tuple)
                else dict(zip(("heads", "kv_heads"), fewer, strict=True))
            )
            case = replace(case, **changed)
    return case


def _pairs(case: Any) -> int:
    heads = case.heads[0] if isinstance(case.heads, tuple) else case.heads
    if isinstance(case, CacheCase):
        return heads * sum(max(rows, 1) * (old + new) for old, rows, new in case.sequences)
    lengths = case.lengths or ((case.seqlen_q, case.seqlen_k),) * case.batch
    return heads * sum(q * k for q, k in lengths)


def _shorter(case: Any) -> Any:
    if isinstance(case, CacheCase):
        return replace(case, sequences=case.sequences[:1] if len(case.sequences) > 1 else tuple(
            tuple(n // 2 for n in each) for each in case.sequences), leftpad=case.leftpad[:1])  # fmt: skip
    if case.lengths:
        return replace(case, lengths=tuple((-(-q // 2), -(-k // 2)) for q, k in case.lengths))
    return replace(case, seqlen_q=-(-case.seqlen_q // 2), seqlen_k=-(-case.seqlen_k // 2))


# What every build of the library must be made for, whatever the seed: each edge of a width of tiles, what lies on its
# other side, and a width between.
SWEPT = (1, 8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 136, 160, 176, 192, 208, 256)
_FULL: dict[str, Any] = {}
_MASKS: tuple[dict[str, Any], ...] = (_FULL, {"causal": True}, {"window": (100, 9)})
_KINDS_OF_CALLS: tuple[dict[str, Any], ...] = (
    {"softcap": 20.0},
    {"alibi": "h", "causal": True},
    {"bias": "hqk"},
    {"mask": "bhqk", "causal": True},
    {"sinks": True, "dropout": 0.1},
    {"intervals": "documents", "causal": True},
    {"intervals": "both"},
    {"chunk": 300, "causal": True},
    {"lengths": ((1000, 1000), (513, 700)), "name": "varlen", "causal": True},
)


def sweep(dims: Sequence[int] = SWEPT) -> list[Drawn]:
    """Calls of every head_dim in turn: plain ones with their gradients, those of ranks, cached and 8-bit ones.

    The masks, features and dtypes go round, so that each meets narrow and wide tiles.
    """
    found: list[Drawn] = []
    features, dtypes = itertools.cycle(_KINDS_OF_CALLS), itertools.cycle((torch.float16, torch.bfloat16, torch.float32))
    for n, dim in enumerate(dims):
        usual: dict[str, Any] = dict(seqlen_q=1024, seqlen_k=1024, heads=8, kv_heads=4, head_dim=dim)
        found.append(Drawn(n, "plain", Case(**({"name": "swept"} | usual | _MASKS[n % 3])), FLOATS[n % 2]))
        found.append(Drawn(n, "plain", Case(**({"name": "featured"} | usual | next(features))), next(dtypes)))
        of_ranks = Case(**({"name": "varlen", "lengths": ((512, 700), (300, 300)), "causal": True} | usual))
        found.append(Drawn(n, "pieces", of_ranks, FLOATS[n % 2], Pieces()))
        cached = CacheCase(
            "swept", ((5000, 1, 0), (700, 1, 0)), heads=(8, 71)[n % 2], kv_heads=(2, 1)[n % 2], head_dim=dim,
            page_size=(0, 16, 256)[n % 3], float8=("", "", "h", "")[n % 4],
        )  # fmt: skip
        chunk = CacheCase(
            "chunk", ((900, 64, 64), (30, 64, 64)), heads=8, kv_heads=2, head_dim=dim, appends=True,
            rotary=dim // 2 * 2, page_size=(16, 0)[n % 2], float8=("none", "")[n % 2],
        )  # fmt: skip
        # So few keys that nothing is ever split.
        short = CacheCase("short", ((60, 1, 0), (9, 1, 0)), heads=71, kv_heads=1, head_dim=dim)
        found += [Drawn(n, "cached", cached, FLOATS[n % 2]), Drawn(n, "cached", chunk, FLOATS[n % 3])]
        found.append(Drawn(n, "cached", short, FLOATS[n % 2]))
        if dim % 16 == 0:
            lengths = ((600, 900), (600, 900))
            found.append(
                Drawn(
                    n,
                    "quantized",
                    QuantizedCase(
                        "swept",
                        lengths,
                        heads=8,
                        kv_heads=4,
                        head_dim=dim,
                        shifted=True,
                        **{"window": (100, 9), **_MASKS[n % 2]},
                    ),
                )
            )
    return found


def draw_for_pairs(seed: int, longest: int) -> tuple[Case, torch.dtype]:
    """A call that has all that the Hopper backward by pairs of programs needs, but for its length."""
    make = random.Random(seed)
    width, (heads, kv_heads) = make.choice([192, 256]), make.choice([(1, 1), (2, 1), (2, 2), (3, 1), (6, 2)])
    head_dim, feature = width - make.choice([0, 0, 8, 24]), make.choice(["", "", "softcap", "alibi"])
    case = Case(
        "pairs", batch=make.choice([1, 1, 2, 3]), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        head_dim_v=make.choice([None, head_dim - 16]) if width == 256 else None, causal=make.random() < 0.5,
        seqlen_q=make.choice([1, 64, 65, make.randint(1, longest)]),
        seqlen_k=make.choice([1, 64, 128, 129, make.randint(1, longest)]),
        softcap=5.0 if feature == "softcap" else 0.0, alibi="h" if feature == "alibi" else "",
        sinks=make.random() < 0.2, lse_grad=make.random() < 0.3,
    )  # fmt: skip
    return case, make.choice([torch.bfloat16, torch.float16])
