"""api_key, chain and none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.auth.api_key import hash_key, key_prefix, make_key
from policies.auth.chain import ChainAuth
from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import AuthError, Lifecycle, PolicyConfigError, PolicyContext, PolicyUnavailableError
from policies.types import AuthRequest, Principal, TenantId
from tests.policies.auth.tokens import SECRET, sign

REGISTRY = Registry.from_manager(make_manager())
KEY, OTHER = make_key(), make_key()
ENTRY = {"hash": hash_key(KEY), "tenant": "search", "user": "ann", "groups": ["g"], "prefix": key_prefix(KEY)}


def build(name: str, with_: dict[str, Any], **context: Any) -> Any:
    return REGISTRY.build("auth", name, with_, PolicyContext(**context))


def mistakes(name: str, with_: dict[str, Any], **context: Any) -> dict[str, str]:
    with pytest.raises(PolicyConfigError) as caught:
        build(name, with_, **context)
    return dict(caught.value.mistakes)


def test_keys_are_random_recognisable_and_stored_hashed() -> None:
    assert KEY.startswith("fb_")
    assert len(KEY) >= 40
    assert KEY != OTHER
    assert KEY not in hash_key(KEY)
    assert KEY.startswith(key_prefix(KEY))
    assert len(key_prefix(KEY)) == 11


@pytest.mark.parametrize(
    "headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}]
)
async def test_a_key_passes_in_either_header(headers: dict[str, str]) -> None:
    principal = await build("api_key", {"keys": [ENTRY]}).authenticate(AuthRequest(headers))
    assert (principal.tenant, principal.user, principal.groups) == ("search", "ann", {"g"})
    assert principal.key_id in hash_key(KEY)
    assert principal.key_id not in KEY


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": OTHER},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": KEY + "x"},
        {"x-api-key": KEY.upper()},
        {"x-api-key": hash_key(KEY)},
        {"x-api-key": "k" * 2**20},
        {"x-api-key": "ключ"},
        {"x-api-key": "\ud800"},
        {"x-api-key": KEY, "authorization": f"Bearer {OTHER}"},
    ],
    ids=["none", "empty", "another", "cut", "longer", "upper", "its hash", "a MiB", "Cyrillic", "surrogate", "two"],
)
async def test_everything_else_is_refused(headers: dict[str, str]) -> None:
    """security 21."""
    with pytest.raises(AuthError) as caught:
        await build("api_key", {"keys": [ENTRY]}).authenticate(AuthRequest(headers))
    assert KEY not in str(caught.value)


async def test_hashes_that_begin_alike_are_compared_whole() -> None:
    twin = {"hash": hash_key(KEY)[:-4] + "0000", "tenant": "twin"}
    auth = build("api_key", {"keys": [twin, ENTRY]})
    assert (await auth.authenticate(AuthRequest({"x-api-key": KEY}))).tenant == "search"


async def test_keys_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps([ENTRY]))
    auth = build("api_key", {"keys_file": "keys.json"}, base_dir=str(tmp_path))
    assert (await auth.authenticate(AuthRequest({"x-api-key": KEY}))).tenant == "search"


async def test_a_listed_key_ends_when_the_file_says(tmp_path: Path) -> None:
    for end, passes in (("2001-01-01T00:00:00Z", False), ("2999-01-01T00:00:00+02:00", True)):
        auth = build("api_key", {"keys": [{**ENTRY, "expires": end}]})
        if passes:
            assert (await auth.authenticate(AuthRequest({"x-api-key": KEY}))).expires_at > 0
        else:
            with pytest.raises(AuthError, match="ended"):
                await auth.authenticate(AuthRequest({"x-api-key": KEY}))
    assert (
        "timezone"
        in mistakes("api_key", {"keys": [{**ENTRY, "expires": "2999-01-01T00:00:00"}]})["with.keys.0.expires"]
    )


@pytest.mark.parametrize(
    ("with_", "path", "message"),
    [
        ({}, "with.keys", "no keys"),
        ({"keys": [{**ENTRY, "hash": KEY}]}, "with.keys.0.hash", "pattern"),
        ({"keys": [ENTRY, {**ENTRY, "tenant": "b"}]}, "with.keys.1.hash", "listed twice"),
        ({"keys_file": "absent.json"}, "with.keys_file", "cannot be read"),
        ({"keys_file": "bad.json"}, "with.keys_file", "not JSON"),
        ({"keys_file": "wrong.json"}, "with.keys_file", "0.tenant: is missing"),
    ],
)
def test_wrong_configurations_do_not_start(with_: dict[str, Any], path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "wrong.json").write_text(json.dumps([{"hash": hash_key(KEY)}]))
    found = mistakes("api_key", with_, base_dir=str(tmp_path))
    assert message in found[path]
    assert KEY not in str(found)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
async def test_none_serves_loopback(host: str) -> None:
    principal = await build("none", {"tenant": "dev"}, listen_host=host).authenticate(AuthRequest({}))
    assert principal == Principal(TenantId("dev"), method="none")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "example.com", "localhost.example.com"])
def test_none_refuses_to_start_where_others_can_reach_it(host: str) -> None:
    assert "loopback only" in mistakes("none", {"tenant": "dev"}, listen_host=host)["with"]


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def authenticate(self, request: AuthRequest) -> Principal:
        if isinstance(self.answer, Exception):
            raise self.answer
        return Principal(TenantId(self.answer))


NO, DOWN, BUG = AuthError("no"), PolicyUnavailableError("down", 7.0), RuntimeError("bug")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a", "b"], "a"),
        ([NO, "b"], "b"),
        ([DOWN, "b"], "b"),
        ([BUG, "b"], "b"),
        ([NO, NO], AuthError),
        ([NO, DOWN], PolicyUnavailableError),
        ([DOWN, NO], PolicyUnavailableError),
        ([BUG, NO], PolicyUnavailableError),
    ],
    ids=str,
)
async def test_chain_takes_the_first_and_fails_closed(answers: list[Any], expected: Any) -> None:
    chain = ChainAuth([Answers(answer) for answer in answers])
    if isinstance(expected, str):
        assert (await chain.authenticate(AuthRequest({}))).tenant == expected
        return
    with pytest.raises(expected) as caught:
        await chain.authenticate(AuthRequest({}))
    if DOWN in answers:
        assert caught.value.retry_after_s == 7.0


class Living(Answers):
    """With a lifecycle."""

    def __init__(self, notes: list[str], name: str, *, closes: bool = True) -> None:
        super().__init__(name)
        self.notes, self.name, self.closes = notes, name, closes

    async def start(self) -> None:
        self.notes.append(f"start {self.name}")

    async def close(self) -> None:
        self.notes.append(f"close {self.name}")
        if not self.closes:
            raise RuntimeError("cannot close")


async def test_chain_starts_and_closes_its_policies() -> None:
    notes: list[str] = []
    chain = ChainAuth([Living(notes, "a"), Answers("b"), Living(notes, "c", closes=False)])
    assert isinstance(chain, Lifecycle)
    await chain.start()
    with pytest.raises(RuntimeError, match="cannot close"):
        await chain.close()
    assert notes == ["start a", "start c", "close c", "close a"]


async def test_chain_of_real_policies() -> None:
    jwt_config = {"algorithms": ["HS256"], "audience": "forebay", "issuer": "https://idp.example", "key_env": "KEY"}
    chain = build(
        "chain",
        {"policies": [{"use": "jwt", "with": jwt_config}, {"use": "api_key", "with": {"keys": [ENTRY]}}]},
        env={"KEY": SECRET},
    )
    assert (await chain.authenticate(sign())).method == "jwt"
    assert (await chain.authenticate(AuthRequest({"authorization": f"Bearer {KEY}"}))).method == "api_key"
    with pytest.raises(AuthError):
        await chain.authenticate(AuthRequest({"x-api-key": OTHER}))
    assert mistakes("chain", {"policies": []})
