"""``engine.role`` and ``engine.transfer``: who computes prompts for whom. No torch: the gateway validates with it."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from policies.strict import StrictScalars

Role = Literal["both", "prefill", "decode"]
"""``both`` serves requests whole. ``prefill`` only computes prompts, for others. ``decode`` has the blocks of long
prompts handed to it by prefill workers, and computes what is left, or everything where none can."""


class Transfer(StrictScalars):
    """How keys and values get from a prefill worker to a decode worker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_tokens: int = Field(128, ge=1)
    """Of a decode worker: shorter prompts it computes itself."""
    timeout_s: float = Field(10.0, gt=0, le=3600)
    """Of a decode worker: it waits no longer for a prompt's blocks; then it computes the prompt itself."""
    lease_s: float = Field(15.0, gt=0, le=3600)
    """Of a prefill worker: computed blocks stay for whoever fetches them so long, and no longer."""
