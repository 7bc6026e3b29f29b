"""These tests run kernels in Triton's interpreter, which must be on before Triton is imported."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
