"""What the suites share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

from policies.registry import protocol_problem
from policies.spi import Kind, Lifecycle
from policies.types import Job, JobId, TenantId


def make_job(job_id: str, tenant: str = "a", *, prompt: int = 10, output: int = 10, **fields: Any) -> Job:
    """A job with what tests seldom care about filled in."""
    fields.setdefault("arrived_at", 0.0)
    return Job(JobId(job_id), TenantId(tenant), "model", prompt, output, **fields)


def always(job: Job) -> bool:
    """``fits`` of an empty worker."""
    return True


class Conformance:
    """Base of the suites."""

    kind: ClassVar[Kind]

    def make(self) -> Any:
        """A fresh policy object."""
        raise NotImplementedError("define make() to return a fresh policy object")

    def test_has_the_methods_of_its_protocol_in_their_colour(self) -> None:
        assert protocol_problem(self.kind, self.make()) is None, protocol_problem(self.kind, self.make())


def run(coroutine: Coroutine[Any, Any, Any], *policies: Any) -> Any:
    """Run one async story to its end, with these policies started before and closed after it."""

    async def story() -> Any:
        living = [policy for policy in policies if isinstance(policy, Lifecycle)]
        for policy in living:
            await policy.start()
        try:
            return await coroutine
        finally:
            for policy in living:
                await policy.close()

    return asyncio.run(story())
