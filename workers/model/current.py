"""Which CUDA device a thread works on: the first, until the thread says otherwise, whatever thread said so before.

PyTorch's own operations go where their tensors are. Kernels of libraries (Triton's, FlashInfer's), recordings and NCCL
go to the thread's device.
"""

from __future__ import annotations

import torch


def work_on(device: torch.device) -> None:
    """From now on this thread works on ``device``. Nothing on a CPU, and where no number is named."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
