"""Reading the keys that the dumps of several policies share (``policies.spi.SchedulingPolicy.dump``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from policies.types import TenantId


def read_service(state: Mapping[str, Any]) -> dict[TenantId, float]:
    """The shared key ``service``. Raises ValueError when malformed."""
    service = state.get("service", {})
    if not isinstance(service, Mapping):
        raise ValueError("'service' must map tenants to numbers")
    for tenant, counter in service.items():
        if not is_number(counter):
            raise ValueError(f"'service' of tenant {tenant!r} must be a finite number, got {counter!r}")
    return {TenantId(str(tenant)): float(counter) for tenant, counter in service.items()}


def is_number(value: Any) -> bool:
    """Finite, and none of the booleans."""
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
