"""Tests that run kernels need Triton's interpreter, tests that build kernels must not have it.

It is on or off for a whole process, from before Triton is imported. So the suite runs twice: as it is, and once with
``TRITON_INTERPRET=1 pytest tests/backends/portable tests/backends/device``.
"""

import os

collect_ignore = (
    ["test_selected_builds.py", "test_tiles.py", "test_tuned.py", "test_warm.py"]
    if os.environ.get("TRITON_INTERPRET") == "1"
    else [
        "test_interpreter.py",
        "test_mods.py",
        "test_non_finite.py",
        "test_quantized.py",
        "test_repair.py",
        "test_second.py",
        "test_selected.py",
        "test_selected_backward.py",
        "test_selected_blocks.py",
        "test_selected_lists.py",
        "test_steps.py",
        "test_tuning.py",
    ]
)
