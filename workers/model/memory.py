"""What a device's memory holds, for ``forebay_device_memory_bytes`` (asked when Prometheus asks, never in a step); and
what may be done about it while nothing else is to do."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from workers.model.budget import free_bytes
from workers.model.native.decoder import TOUCHED, NativeCache


def held(device: str, weights: int, kv: int, ranks: int = 1) -> dict[str, int]:
    """Bytes by kind: ``weights`` and ``kv`` as given; ``free``; on CUDA ``activations``, all that PyTorch keeps beside.

    ``ranks``: devices that share weights, keys and values; ``free`` and ``activations`` are of the first.

    On a CPU activations come and go in the process's heap, where nothing tells them from the rest.
    """
    found = {"weights": weights, "kv": kv}
    if device.startswith("cuda"):
        found["free"] = torch.cuda.mem_get_info(torch.device(device))[0]
        found["activations"] = max(0, torch.cuda.memory_reserved(torch.device(device)) - (weights + kv) // ranks)
    else:
        found["free"] = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found


def touching(runner: object) -> Callable[[], bool]:
    """Touches the next part of a runner's cache (``NativeCache.touch``); says False when there is none, and when others
    might need the memory sooner."""
    cache = getattr(runner, "cache", None)
    if not isinstance(cache, NativeCache):
        return lambda: False
    return lambda: free_bytes(torch.device("cpu")) > TOUCHED and cache.touch()
