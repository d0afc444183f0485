"""The conformance kit over every registered policy, and the kit's own teeth: broken policies must not pass it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest

from policies import testing
from policies.auth import api_key
from policies.manager import make_manager
from policies.quota.ledger import LedgerConfig, LedgerQuota
from policies.registry import Registry
from policies.scheduling._tariff import Tariff
from policies.scheduling.fcfs import FcfsScheduler
from policies.scheduling.vtc import VtcScheduler
from policies.spi import KINDS, PolicyContext
from policies.types import AuthRequest, Charge, Job

REGISTRY = Registry.from_manager(make_manager())
KEY = "fb_contract-test-key"
SECRET = "s" * 64
CONTEXT = PolicyContext(env={"FOREBAY_TEST_KEY": SECRET}, server_secret=b"k" * 32)
JWT_CONFIG = {"algorithms": ["HS256"], "audience": "forebay", "issuer": "test", "key_env": "FOREBAY_TEST_KEY"}
API_KEY_CONFIG = {"keys": [{"hash": api_key.hash_key(KEY), "tenant": "search"}]}


def _jwt_request() -> AuthRequest:
    claims = {"iss": "test", "aud": "forebay", "exp": 4102444800, "tenant": "search"}
    return AuthRequest({"authorization": f"Bearer {jwt.encode(claims, SECRET, 'HS256')}"})


def _key_request() -> AuthRequest:
    return AuthRequest({"x-api-key": KEY})


# What a policy needs to be built, and what it does not promise; a policy that is not named here promises everything.
CONFIGS: dict[str, dict[str, Any]] = {
    "auth.jwt": JWT_CONFIG,
    "auth.api_key": API_KEY_CONFIG,
    "auth.none": {"tenant": "dev"},
    "auth.jwt_issuers": {"issuers": [JWT_CONFIG]},
    "auth.mtls_proxy": {
        "trusted_proxies": ["10.0.0.1"],
        "identities": [{"field": "uri", "match": "spiffe://x/(?P<tenant>.+)"}],
    },
    "auth.chain": {"policies": [{"use": "jwt", "with": JWT_CONFIG}, {"use": "api_key", "with": API_KEY_CONFIG}]},
}
PROMISES: dict[str, dict[str, Any]] = {
    "auth.jwt": {"good_request": _jwt_request},
    "auth.api_key": {"good_request": _key_request},
    "auth.chain": {"good_request": _key_request},
    "auth.jwt_issuers": {"good_request": _jwt_request},
    "auth.mtls_proxy": {
        "good_request": lambda: AuthRequest({"x-forwarded-client-cert": "URI=spiffe://x/search"}, "10.0.0.1")
    },
    "auth.none": {"accepts_anybody": True, "good_request": lambda: AuthRequest({})},
    "quota.unlimited": {"enforces": ()},
    "quota.shared": {"enforces": ("concurrent",)},  # all of its objects have the same books: one limit is tried
}


@contextlib.contextmanager
def _keeper() -> Iterator[dict[str, Any]]:
    """A ledger that is served beside the test; how to ask for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            quota = LedgerQuota(path, LedgerConfig(serve=True))
            asyncio.run_coroutine_threadsafe(quota.start(), loop).result(30)
            yield {"path": str(path), "timeout_s": 30.0}
            asyncio.run_coroutine_threadsafe(quota.close(), loop).result(30)
        finally:  # a thread that runs on keeps the whole run from ending
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[dict[str, Any]]]] = {"quota.shared": _keeper}
"""What a policy needs beside itself; its settings."""
CASES = [
    pytest.param(item.spec.kind, item.spec.name, check, id=f"{item.spec.kind}.{item.spec.name}-{check[5:]}")
    for item in REGISTRY.policies()
    for check in testing.checks(item.spec.kind)
]


@pytest.mark.parametrize(("kind", "name", "check"), CASES)
def test_policy_keeps_its_contract(kind: Any, name: str, check: str, tmp_path: Path) -> None:
    key = f"{kind}.{name}"
    around = SURROUNDINGS.get(key, lambda: contextlib.nullcontext(CONFIGS.get(key, {})))
    with around() as settings:

        def make() -> Any:
            context = replace(CONTEXT, state_dir=tempfile.mkdtemp(dir=tmp_path))
            return REGISTRY.build(kind, name, settings, context)

        getattr(testing.suite(kind, make, **PROMISES.get(key, {}))(), check)()


def test_every_kind_has_a_suite_and_a_policy() -> None:
    assert set(testing.SUITES) == set(KINDS)
    assert {item.spec.kind for item in REGISTRY.policies()} == set(KINDS)


class Loses(FcfsScheduler):
    def discard(self, job_id: Any) -> bool:
        self._lines.pop(next(self._lines.tenants()))
        return True


class Blocks(FcfsScheduler):
    def pop(self, now: float, fits: Any) -> Job | None:
        return super().pop(now, lambda job: True) if fits(self._lines.head(self._heads.first(lambda t: True))) else None


class Starves(FcfsScheduler):
    def pop(self, now: float, fits: Any) -> Job | None:
        return super().pop(now, lambda job: fits(job) and (job.tenant != "quiet" or len(self) == 1))


class ChargesOnlyItsOwn(FcfsScheduler):
    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        raise KeyError(job.id)


class DumpsJobs(FcfsScheduler):
    def dump(self) -> dict[str, Any]:
        return {"jobs": object()}


class ForgetsService(VtcScheduler):
    def __init__(self) -> None:
        super().__init__(Tariff(1.0, 2.0, 0.0))

    def load(self, state: Any) -> None:
        super().load({**state, "service": dict.fromkeys(state.get("service", {}), 0.0)})


class ForgetsWhatWasPaid(ForgetsService):
    def load(self, state: Any) -> None:
        VtcScheduler.load(self, {key: value for key, value in state.items() if key != "prepaid"})


@pytest.mark.parametrize("broken", [Loses, Blocks, Starves, ChargesOnlyItsOwn, DumpsJobs])
def test_the_kit_finds_broken_schedulers(broken: Any) -> None:
    with pytest.raises((AssertionError, KeyError, TypeError)):
        testing.conformance("scheduling", broken)


@pytest.mark.parametrize("broken", [ForgetsService, ForgetsWhatWasPaid])
def test_the_kit_finds_a_load_that_keeps_the_keys_and_drops_what_they_hold(broken: Any) -> None:
    with pytest.raises(AssertionError, match="load did not take over"):
        testing.conformance("scheduling", broken)


def test_conformance_runs_a_whole_suite() -> None:
    testing.conformance("scheduling", FcfsScheduler)
