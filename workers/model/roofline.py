"""What the machine can do at most: bytes read and multiply-adds per second, measured. For ``forebay bench floor``.

The two limits of the roofline model (Williams, Waterman, Patterson 2009). Memory is read by several of torch's kernels
over a buffer that no cache holds, and multiplied in square matrices of several sizes; the best of all counts, since a
limit is asked for, not a typical rate.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
READ_BYTES = 2**30
SLICE_BYTES = 2**27
"""Read at a time: short enough to fall between two interruptions, and out of every cache when its turn comes again."""
SIZES = (512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one device."""

    device: str
    threads: int
    bytes_s: float
    """Reading memory."""
    flops_s: dict[str, float]
    """By dtype; a multiply-add is two."""


def measure(
    device: str = "cpu",
    *,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    threads: int | None = None,
    read_bytes: int = READ_BYTES,
    sizes: tuple[int, ...] = SIZES,
    seconds: float = 1.0,
) -> Rates:
    """Measure for about ``seconds`` per rate. Takes ``read_bytes`` of memory. Sets torch's threads if told to.

    Raises ValueError for an unknown dtype or a buffer under 1 MiB.
    """
    for name in dtypes:
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if read_bytes < 2**20:
        raise ValueError(f"read_bytes={read_bytes} is under 1 MiB: a cache would be measured")
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    with torch.inference_mode():
        bandwidth = _bandwidth(place, read_bytes, seconds)
        flops = {name: _flops(place, DTYPES[name], sizes, seconds) for name in dtypes}
    return Rates(str(place), torch.get_num_threads(), bandwidth, flops)


def _bandwidth(device: torch.device, size: int, seconds: float) -> float:
    """Bytes per second."""
    columns = 1024
    rows = min(size, SLICE_BYTES) // 4 // columns
    parts = torch.ones(max(1, size // SLICE_BYTES), rows, columns, device=device)
    turn = itertools.cycle(parts)
    vector = torch.ones(columns, device=device)
    readers: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda part: torch.mv(part, vector),
        torch.sum,
        torch.amax,
        lambda part: torch.amax(part.view(torch.int32)),
    )

    def best(read: Callable[[torch.Tensor], object]) -> float:
        return _best(lambda: read(next(turn)), device, seconds / len(readers))

    return parts[0].nbytes / min(map(best, readers))


def _flops(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], seconds: float) -> float:
    """Floating-point operations per second."""
    rates = []
    for size in sizes:
        left = torch.ones(size, size, dtype=dtype, device=device)
        right = torch.ones(size, size, dtype=dtype, device=device)
        out = torch.empty(size, size, dtype=dtype, device=device)

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> None:
            torch.mm(left, right, out=out)

        rates.append(2 * size**3 / _best(multiply, device, seconds / len(sizes)))
    return max(rates)


def _best(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of as many calls as fit into ``seconds``, at least three after one that warms up."""
    best = float("inf")
    end = float("inf")
    calls = 0
    while calls < 4 or time.perf_counter() < end:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        taken = time.perf_counter() - start
        if calls:
            best = min(best, taken)
        else:
            end = start + taken + seconds
        calls += 1
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
