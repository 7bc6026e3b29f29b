"""SGLang's speculative decoding through our classes writes what plain greedy decoding does, for drafts of all shapes.

A small random model and a drafter, which is the same model with noise in its weights, run as SGLang 0.5.23's EAGLE
worker lets them (``srt/speculative/eagle_worker_v2.py``): the slots, lengths and masks are as there. A branch keeps its
keys when the drafter goes on with another branch's token, as there.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import UnsupportedError
from flashtile.integrations import sglang as sglang_names
from flashtile.serving import tree_words
from tests.plugins import contract
from tests.trees import ancestors

SGLANG = "flashtile.integrations._sglang_backend"
VOCABULARY, HIDDEN, LAYERS, HEADS, HEADS_KV, DIM = 40, 32, 2, 4, 2, 16
# Shorter than a page of 16, longer, and whole pages.
PROMPTS, NEW_TOKENS, WIDTH = [9, 21, 32], 16, 112
FULL, SPARE = 4, 2  # A graph's requests, and how many pages of the pool are nobody's.


@pytest.fixture
def sglang() -> Iterator[Any]:
    with contract.stand_ins(SGLANG) as (found,):
        yield found


class Decoder:
    """A decoder with rotated positions, its weights with so much noise; and its keys and values by slot.

    With a window its last layer has one, and a pool of its own with the pages in another order.
    """

    def __init__(self, sglang: Any, slots: int, page_size: int, noise: float, window: int | None) -> None:
        draw, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            mine, more = (torch.randn(rows, columns, dtype=torch.float64, generator=x) for x in (draw, other))
            return (mine + noise * more) * gain / rows**0.5

        wide, narrow = HEADS * DIM, HEADS_KV * DIM
        self.embedding, self.head = weight(VOCABULARY, HIDDEN, VOCABULARY**0.5), weight(HIDDEN, VOCABULARY)
        sizes = [(HIDDEN, wide, 2.0), (HIDDEN, narrow, 2.0), (HIDDEN, narrow, 1.0), (wide, HIDDEN, 2.0)]
        self.weights = [[weight(*size) for size in sizes] for _ in range(LAYERS)]
        self.cache = torch.zeros(LAYERS, 2, slots, HEADS_KV, DIM, dtype=torch.float64)
        self.page_size, self.windows = page_size, [-1] * (LAYERS - 1) + [-1 if window is None else window]
        self.swa_layer_nums, self.layers_mapping = 1, [(i, window >= 0) for i, window in enumerate(self.windows)]
        self.layers = [
            types.SimpleNamespace(
                tp_q_head_num=HEADS, qk_head_dim=DIM, layer_id=i, scaling=DIM**-0.5, logit_cap=0.0, k_scale=None,
                sliding_window_size=self.windows[i], is_cross_attention=False,
                attn_type=sglang.AttentionType.DECODER,
            )
            for i in range(LAYERS)
        ]  # fmt: skip

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.cache[layer_id, 0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.cache[layer_id, 1]

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor) -> None:
        self.cache[layer.layer_id, :, where[self.windows[layer.layer_id] >= 0]] = torch.stack([k, v])

    def translate_loc_from_full_to_swa(self, slots: Tensor) -> Tensor:
        return (slots + self.page_size) % self.cache.shape[2]

    def copy(self, old: Tensor, new: Tensor) -> None:
        """Copies keys and values from slots to others."""
        for cache, window in zip(self.cache, self.windows, strict=True):
            here, there = (x if window < 0 else self.translate_loc_from_full_to_swa(x) for x in (old, new))
            cache[:, there] = cache[:, here]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Logits ``(tokens, VOCABULARY)``; ``attend`` takes q, k and v by head, and the layer."""
        angles = positions[:, None, None] / 100.0 ** (torch.arange(DIM // 2) / (DIM // 2))
        x = self.embedding[tokens]
        for layer, (w_q, w_k, w_v, w_out) in zip(self.layers, self.weights, strict=True):
            y = torch.nn.functional.rms_norm(x, (HIDDEN,))
            q, k, v = ((y @ w).unflatten(-1, (-1, DIM)) for w in (w_q, w_k, w_v))
            q, k = (
                torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
                for a, b in (z.chunk(2, dim=-1) for z in (q, k))
            )
            x = x + attend(q, k, v, layer).flatten(1) @ w_out
        return torch.nn.functional.rms_norm(x, (HIDDEN,)) @ self.head

    def plain(self, tokens: list[int]) -> Tensor:
        """Logits of the token behind these, by plain attention without a cache."""

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
            distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
            left = layer.sliding_window_size
            seen = (distance >= 0) & (distance <= (left if left >= 0 else len(q)))
            k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=1).transpose(0, 1) for x in (k, v))
            scores = (q.transpose(0, 1) @ k.mT * layer.scaling).masked_fill(~seen, -torch.inf)
            return (scores.softmax(-1) @ v).transpose(0, 1)

        return self(torch.tensor(tokens), torch.arange(len(tokens)), attend)[-1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """So many tokens behind the prompt."""
        found = list(prompt)
        for _ in range(count):
            found.append(int(self.plain(found).argmax()))
        return found[len(prompt) :]


def best(nodes: list[tuple[float, int, int]], some: range, count: int) -> list[int]:
    """So many of some nodes, the likeliest, in their order."""
    return sorted(sorted(some, key=lambda i: -nodes[i][0])[:count])


def spec_input(kind: str, **fields: Any) -> Any:
    return types.SimpleNamespace(spec_input_type=types.SimpleNamespace(name=kind), **fields)


class Worker:
    """A round of drafts after the other, for requests that all go on together.

    Args:
        sglang: Our module.
        topk: Branches.
        num_steps: Tokens of a branch.
        rows: Drafts that the target computes of each request, the last token that it gave itself among them.
        page_size: Tokens of a page.
        graphs: Whether records are made as for CUDA graphs of ``FULL`` requests.
        window: The keys that a query sees before its own.
    """

    def __init__(
        self, sglang: Any, topk: int, num_steps: int, rows: int, page_size: int, graphs: bool, window: int | None
    ) -> None:
        torch.manual_seed(0)
        self.topk, self.num_steps, self.rows, self.page_size, self.graphs = topk, num_steps, rows, page_size, graphs
        self.prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in PROMPTS]
        pages = len(PROMPTS) * WIDTH // page_size + SPARE
        # The first pages are for what only fills a graph.
        order = torch.randperm(pages - SPARE).view(len(PROMPTS), -1) + SPARE
        self.slots = (order[..., None] * page_size + torch.arange(page_size)).flatten(1)
        of = Decoder if window is None else type("WindowDecoder", (Decoder, sglang.SWAKVPool), {})
        self.target, self.drafter = (of(sglang, pages * page_size, page_size, x, window) for x in (0.0, 0.08))
        target, drafter = map(self.runner, (self.target, self.drafter))
        self.prefills, self.reads = sglang.Backend(target), sglang.Backend(drafter)
        self.verifies, self.drafts = sglang.Backend(target), sglang.DraftSteps(drafter, topk, num_steps)
        if graphs:
            self.verifies.init_cuda_graph_state(FULL, FULL * rows)
            self.drafts.init_cuda_graph_state(FULL, FULL * topk)
        self.accepted: list[list[int]] = []
        self.places: dict[Any, list[int]] = {}
        self.branches: list[tuple[list[int], Tensor]] = []  # what a drafter has read, and its logits

    def runner(self, pool: Decoder) -> Any:
        return types.SimpleNamespace(
            device="cpu", page_size=self.page_size, token_to_kv_pool=pool,
            req_to_token_pool=types.SimpleNamespace(req_to_token=self.slots),
            server_args=types.SimpleNamespace(enable_deterministic_inference=False),
        )  # fmt: skip

    def batch(self, lengths: Tensor, mode: str, spec: Any, where: Tensor, **more: Any) -> Any:
        """The fields that are read of SGLang's batch; with requests that fill a graph, if this is for one."""
        owners, filled = torch.arange(len(PROMPTS)), FULL - len(PROMPTS)
        if self.graphs and mode != "EXTEND":
            where = torch.nn.functional.pad(where, (0, where.numel() // len(PROMPTS) * filled))
            lengths = torch.nn.functional.pad(lengths, (0, filled), value=1)
            owners = torch.nn.functional.pad(owners, (0, filled))
        fields: dict[str, Any] = dict.fromkeys(
            contract.READ["sglang.srt.model_executor.forward_batch_info"]["ForwardBatch"]
        )
        fields |= dict(
            batch_size=len(lengths), seq_lens=lengths, req_pool_indices=owners, out_cache_loc=where, spec_info=spec,
            seq_lens_cpu=None if self.graphs else lengths,
            forward_mode=types.SimpleNamespace(
                is_decode_or_idle=lambda: mode == "DECODE", is_target_verify=lambda: mode == "TARGET_VERIFY"
            ),
        )  # fmt: skip
        return types.SimpleNamespace(**fields | more)

    def prepare(self, backend: Any, batch: Any) -> None:
        """Makes the step's record. Those for graphs stay where they are."""
        if not self.graphs or batch.extend_seq_lens is not None:
            backend.init_forward_metadata(batch)
            return
        backend.init_forward_metadata_out_graph(batch, in_capture=backend not in self.places)
        whole = backend
        if backend is self.drafts:
            whole = backend._whole
            for _ in range(2):  # before a graph is recorded it is run
                backend.init_forward_metadata_in_graph(batch)
        kept = [x.data_ptr() for x in vars(whole.forward_metadata).values() if isinstance(x, Tensor)]
        assert self.places.setdefault(backend, kept) == kept

    def run(self, model: Decoder, tokens: Tensor, positions: Tensor, backend: Any, batch: Any, decodes: bool) -> Tensor:
        """Logits of the tokens; what fills a graph is left out of them."""
        count, filled = len(tokens), len(batch.out_cache_loc) - len(tokens)
        tokens, positions = (torch.nn.functional.pad(x, (0, filled)) for x in (tokens, positions))
        call = backend.forward_decode if decodes else backend.forward_extend

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
            return call(q.flatten(1), k, v, layer, batch).unflatten(1, (HEADS, DIM))

        return model(tokens, positions, attend)[:count]

    def extend(self, model: Decoder, tokens: list[list[int]], before: Tensor, backend: Any, spec: Any) -> Tensor:
        """Logits of requests' next tokens, ``(batch, tokens, VOCABULARY)``, padded with zeros."""
        new = torch.tensor([*map(len, tokens)])
        places = [torch.arange(start, start + len(x)) for start, x in zip(before.tolist(), tokens, strict=True)]
        where = torch.cat([slots[place] for slots, place in zip(self.slots, places, strict=True)])
        batch = self.batch(
            before + new, "EXTEND", spec, where, extend_seq_lens=new.int(), extend_seq_lens_cpu=new.tolist()
        )
        self.prepare(backend, batch)
        given = torch.tensor([*itertools.chain(*tokens)])
        logits = self.run(model, given, torch.cat(places), backend, batch, False)
        return torch.nn.utils.rnn.pad_sequence(list(logits.split(new.tolist())), batch_first=True)

    def draft(self, read: list[list[int]], lengths: Tensor, logits: Tensor) -> list[list[tuple[int, int]]]:
        """Each request's drafts but the first: a token, and the row of its parent.

        Of every step's ``topk`` branches and their ``topk`` best tokens, ``topk`` go on.
        """
        topk, steps, size = self.topk, self.num_steps, self.page_size
        whole = lengths // size * size
        own = -(-(lengths - whole + steps) // size) * size
        starts = lengths[:, None] + torch.arange(topk) * own[:, None]  # (batch, topk)
        for b, (start, stop) in enumerate(zip(whole.tolist(), lengths.tolist(), strict=True)):
            for branch in range(1, topk):  # each branch begins with a copy of what the last page holds
                old, new = (self.slots[b, x : x + stop - start] for x in (start, start + branch * int(own[b])))
                self.drafter.copy(old, new)
        where = self.slots.gather(1, (starts[..., None] + torch.arange(steps)).flatten(1)).view(-1, topk, steps)
        batch = self.batch(lengths, "DECODE", spec_input("EAGLE_DRAFT"), where.flatten())
        self.prepare(self.drafts, batch)
        written = batch.out_cache_loc.view(-1, topk, steps)
        probs, tokens = logits.softmax(-1).topk(topk)  # (batch, topk)
        nodes = [
            [(float(p), int(t), -1) for p, t in zip(*each, strict=True)] for each in zip(probs, tokens, strict=True)
        ]
        live = [list(range(topk)) for _ in nodes]  # the nodes that go on, by branch
        branches = [list(each) for each in read for _ in range(topk)]
        for step in range(steps - 1):
            batch.out_cache_loc = written[:, :, step].flatten()
            fed = torch.tensor([nodes[b][i][1] for b, each in enumerate(live) for i in each])
            positions = (lengths + step).repeat_interleave(topk)
            got = self.run(self.drafter, fed, positions, self.drafts.attn_backends[step], batch, True)
            for of, token, mine in zip(branches, fed.tolist(), got, strict=True):
                of.append(token)
                self.branches.append((list(of), mine))
            probs, tokens = got.softmax(-1).topk(topk)
            for b, each in enumerate(live):
                first = len(nodes[b])
                for branch, i in enumerate(each):
                    row = b * topk + branch
                    more = zip(probs[row].tolist(), tokens[row].tolist(), strict=True)
                    nodes[b] += [(nodes[b][i][0] * p, t, i) for p, t in more]
                live[b] = best(nodes[b], range(first, len(nodes[b])), topk)
        kept = [best(each, range(len(each)), self.rows - 1) for each in nodes]
        return [
            [(of[i][1], 0 if of[i][2] < 0 else rows.index(of[i][2]) + 1) for i in rows]
            for of, rows in zip(nodes, kept, strict=True)
        ]

    def verify(self, lengths: Tensor, last: list[int], drafts: list[list[tuple[int, int]]]) -> list[list[int]]:
        """The rows that the target accepts, and then their keys lie one after the other; ``given`` has its tokens."""
        parents = [[-1] + [parent for _, parent in each] for each in drafts]
        masks = torch.stack([ancestors(each) for each in parents])
        asked = self.verifies.verify_mask
        assert asked.mode.name == "QLEN_ONLY" and asked.max_bs == 0
        places = lengths[:, None] + torch.arange(self.rows)
        where = self.slots.gather(1, places)
        fields = dict(draft_token_num=self.rows, topk=self.topk, custom_mask=masks.flatten())
        batch = self.batch(lengths, "TARGET_VERIFY", spec_input("EAGLE_VERIFY", **fields), where.flatten())
        self.prepare(self.verifies, batch)
        tokens = torch.tensor([[t] + [x for x, _ in each] for t, each in zip(last, drafts, strict=True)])
        positions = lengths[:, None] + masks.sum(-1) - 1
        logits = self.run(self.target, tokens.flatten(), positions.flatten(), self.verifies, batch, False)
        given = logits.argmax(-1).view_as(tokens).tolist()
        found, self.given = [], []
        for b, of in enumerate(parents):
            rows, right = [0], [p >= 0 and tokens[b, u] == given[b][p] for u, p in enumerate(of)]
            while more := [u for u, p in enumerate(of) if p == rows[-1] and right[u]]:
                rows += more
            self.target.copy(where[b, rows], where[b, : len(rows)])
            found.append(rows)
            self.given.append([given[b][row] for row in rows])
        return found

    def generate(self, count: int) -> list[list[int]]:
        """So many tokens of each prompt."""
        lengths = torch.tensor(PROMPTS)
        nothing = torch.zeros_like(lengths)
        logits = self.extend(self.target, self.prompts, nothing, self.prefills, None)
        found = [[int(each[n - 1].argmax())] for each, n in zip(logits, PROMPTS, strict=True)]
        # The drafter reads tokens at the place before their own.
        read = [prompt[1:] + tokens for prompt, tokens in zip(self.prompts, found, strict=True)]
        reads = spec_input("EAGLE_DRAFT_EXTEND")
        logits, last = self.extend(self.drafter, read, nothing, self.reads, reads), lengths - 1
        while min(map(len, found)) < count:
            drafts = self.draft(read, lengths, logits[torch.arange(len(last)), last])
            accepted = self.verify(lengths, [tokens[-1] for tokens in found], drafts)
            # What was not accepted is read too, and overwritten in the next round.
            padded = [given + [0] * (self.rows - len(given)) for given in self.given]
            logits = self.extend(self.drafter, padded, lengths, self.reads, reads)
            new = torch.tensor([*map(len, accepted)])
            lengths, last = lengths + new, new - 1
            read, found = ([a + b for a, b in zip(x, self.given, strict=True)] for x in (read, found))
            self.accepted += accepted
        return [tokens[:count] for tokens in found]


# topk, num_steps, rows, page_size.
SHAPES = {"chain": (1, 4, 5, 1), "chain of pages": (1, 4, 5, 16), "tree": (3, 4, 12, 1), "tree of pages": (2, 3, 7, 16)}


CASES = [*itertools.product(SHAPES, (False, True), (6,)), ("tree", True, None), ("chain of pages", False, None)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "graphs", "window"), CASES)
def test_what_is_written_is_what_greedy_decoding_writes(
    sglang: Any, name: str, graphs: bool, window: int | None
) -> None:
    worker = Worker(sglang, *SHAPES[name], graphs=graphs, window=window)
    assert worker.generate(NEW_TOKENS) == [worker.target.greedy(prompt, NEW_TOKENS) for prompt in worker.prompts]
    # Drafts are accepted; of trees, others than those that follow one another.
    assert sum(map(len, worker.accepted)) > 1.5 * len(worker.accepted)
    assert any(rows != [*range(len(rows))] for rows in worker.accepted) == name.startswith("tree")
    # A wrong draft changes no token, so a branch's logits are compared by themselves.
    for tokens, got in worker.branches[::7]:
        torch.testing.assert_close(got, worker.drafter.plain(tokens))


def test_a_tree_read_as_a_chain_writes_something_else(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(mask: Tensor, rows: int) -> Tensor:
        return tree_words(torch.ones(rows, rows, dtype=torch.bool).tril().expand(len(mask) // rows**2, -1, -1))

    monkeypatch.setattr(sglang, "tree_from_sglang", chain)
    worker = Worker(sglang, *SHAPES["tree"], graphs=False, window=None)
    assert worker.generate(NEW_TOKENS) != [worker.target.greedy(prompt, NEW_TOKENS) for prompt in worker.prompts]


def test_drafters_are_offered_our_backends(sglang: Any) -> None:
    worker, table = Worker(sglang, *SHAPES["tree"], graphs=False, window=None), dict[str, Any]()
    factory = types.SimpleNamespace(draft_model_runner=worker.runner(worker.drafter), topk=3, speculative_num_steps=4)
    wanted = contract.METHODS["sglang.srt.speculative.draft_utils"]["DraftBackendFactory"]["_create_backend"]
    assert tuple(inspect.signature(sglang_names.offer_drafts).parameters) == ("factory", *wanted)
    made = []
    for more in ({}, {"stamps_children": True}):
        sglang_names.offer_drafts(factory, "", table, "", **more)
        name, backend = table[sglang_names.NAME]()
        assert name == sglang_names.NAME
        made.append(backend)
    reads, drafts = made
    assert type(reads) is sglang.Backend and type(drafts) is sglang.DraftSteps
    assert len(drafts.attn_backends) == 3 and drafts._whole.topk == 3


@pytest.mark.parametrize("kind", ["NGRAM_VERIFY", "FROZEN_KV_MTP_DRAFT", "DFLASH_VERIFY"])
def test_what_else_speculates_is_refused(sglang: Any, kind: str) -> None:
    worker = Worker(sglang, *SHAPES["chain"], graphs=False, window=None)
    batch = worker.batch(torch.tensor(PROMPTS), "DECODE", spec_input(kind), torch.arange(3))
    with pytest.raises(UnsupportedError, match=f"no {kind} here"):
        worker.reads.init_forward_metadata(batch)
