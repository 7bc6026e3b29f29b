"""Tests that run kernels need Triton's interpreter, which must be on before Triton is imported."""

import os

collect_ignore = (
    ["test_splitting.py"]
    if os.environ.get("TRITON_INTERPRET") == "1"
    else ["test_device.py", "test_calls.py", "test_fixed_splits.py", "test_shares.py"]
)
