"""The machine's limits are measured at all, in the right units, and bad questions are refused."""

from __future__ import annotations

import pytest
import torch

from workers.model import roofline


def test_rates_of_this_machine() -> None:
    before = torch.get_num_threads()
    rates = roofline.measure(threads=1, dtypes=("float32", "bfloat16"), read_bytes=2**24, sizes=(64, 128), seconds=0.02)
    torch.set_num_threads(before)
    assert (rates.device, rates.threads) == ("cpu", 1)
    # No machine that runs this is slower than a floppy disk or faster than a rack.
    assert 1e7 < rates.bytes_s < 1e14
    assert set(rates.flops_s) == {"float32", "bfloat16"}
    assert all(1e6 < rate < 1e16 for rate in rates.flops_s.values())


def test_bad_questions() -> None:
    with pytest.raises(ValueError, match="float31"):
        roofline.measure(dtypes=("float31",))
    with pytest.raises(ValueError, match="under 1 MiB"):
        roofline.measure(read_bytes=1000)
