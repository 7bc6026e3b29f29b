"""SGLang's own cases for attention backends, which are in its wheel, run through ours, on a CPU.

They compare a backend with plain attention: prompts, prefixes, chunks and single tokens, grouped heads, windows, pages
of 1 and more, which lie shuffled or interleaved; and drafts, in a chain and in a tree.
"""

from __future__ import annotations

import itertools
import unittest
import unittest.mock
from typing import Any

import torch

import tests.plugins.sglang_cpu  # noqa: F401

# isort: split
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as drafts

from flashtile.integrations import sglang as ours

LAYOUTS = ("shuffled_pages", "interleaved_pages", "non_monotonic_extend")


class Kit(unittest.TestCase):
    """One test for each list of cases."""

    count = 0

    def run_cases(self, cases: Any) -> None:
        for case in cases:
            for layout in LAYOUTS:
                # Tokens of one page apart from one another: SGLang lists it as what FA3 fails, and it makes none so.
                if layout == LAYOUTS[-1] and (case.forward_mode.is_decode() or case.page_size > 1):
                    continue
                with self.subTest(case=case.name, layout=layout), torch.no_grad():
                    kit.run_dense_attention_case(self, case, device="cpu", loc_layout=layout)
                    Kit.count += 1

    def test_dense(self) -> None:
        self.run_cases(kit.make_dense_cases(ours.NAME))

    def test_windows(self) -> None:
        self.run_cases(kit.make_swa_no_prefix_input_config_cases(ours.NAME))
        self.run_cases(kit.make_swa_prefix_input_config_cases(ours.NAME))

    def test_drafts(self) -> None:
        """The kit makes masks of all keys; these are of a request's drafts alone, for which the backend asks."""
        whole = drafts._make_custom_masks

        def of_drafts(case: Any, **how: Any) -> Any:
            masks, _ = whole(case, **how)
            return masks, torch.cat([mask[:, -mask.shape[0] :].flatten() for mask in masks])

        # In a tree the kit's windows count rows, where brothers have the same position.
        for (topk, window), page_size in itertools.product(((1, None), (1, 4), (2, None)), (1, 16)):
            case = kit.DenseAttentionCase(
                name=f"drafts of {topk}", backend=ours.NAME, forward_mode=ForwardMode.TARGET_VERIFY, num_heads=4,
                num_kv_heads=2, page_size=page_size, prefix_lens=(3, 16, 20), extend_lens=(3, 3, 3),
                sliding_window_size=window,
            )  # fmt: skip
            mocked = unittest.mock.patch.object(drafts, "_make_custom_masks", of_drafts)
            with self.subTest(topk=topk, page_size=page_size, window=window), torch.no_grad(), mocked:
                drafts.run_dense_eagle_verify_case(self, case, topk=topk, device="cpu")
                Kit.count += 1

    def test_tensors_that_graphs_read_stay_where_they_are(self) -> None:
        case = kit.DenseAttentionCase(
            name="graph", backend=ours.NAME, forward_mode=ForwardMode.DECODE, num_heads=4, num_kv_heads=2, page_size=16,
            prefix_lens=(14, 15, 16),
        )  # fmt: skip
        with torch.no_grad():
            fixture = kit.build_dense_attention_fixture(self, case, device="cpu")
            backend, places = fixture.backend, []
            backend.init_cuda_graph_state(4, 4)
            for in_capture in (True, False):
                backend.init_forward_metadata_out_graph(fixture.forward_batch, in_capture)
                m = backend.forward_metadata
                places.append([x.data_ptr() for x in (m.cache_seqlens, m.page_table)])
            self.assertEqual(*places)
            got, want = kit.run_dense_fixture_eager(fixture), kit.expected_dense_fixture_output(fixture)
            torch.testing.assert_close(got, want, atol=kit.DENSE_ATOL, rtol=kit.DENSE_RTOL)


if __name__ == "__main__":
    ours.register()
    found = unittest.main(exit=False)
    print(f"sglang kit: {Kit.count} cases passed, {len(found.result.failures + found.result.errors)} failed")
    raise SystemExit(not found.result.wasSuccessful())
