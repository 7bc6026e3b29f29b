"""What SGLang needs to be imported where there is no GPU; to be imported before it, in each of its processes.

The package index's torchvision is built for CUDA. Beside PyTorch for CPUs two of its operators are missing, and its
import fails on them alone.
"""

from __future__ import annotations

import torch

for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
