"""The public routes over a real listener: shapes, statuses, headers, identity, default deny."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest

from policies.types import Principal, TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import AUTH, MODEL, Site, events, pool, token, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "tenants": [
        {"id": "alpha", "limits": {"requests_per_minute": 10000, "tokens_per_minute": 1000000, "concurrent": 300}},
        {"id": "beta", "models": ["other-*"]},
        {"id": "narrow", "limits": {"requests_per_minute": 1, "tokens_per_minute": 500, "concurrent": 5}},
        {"id": "low", "class": "batch"},
        {"id": "slow", "limits": {"requests_per_minute": 3}},
    ]
}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True}
COMPLETION = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3}
RESPONSE = {"model": MODEL, "input": "hello", "max_output_tokens": 3}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/v1/responses", RESPONSE)]
RATE = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]


def bearer(tenant: str = "alpha") -> dict[str, str]:
    return {"authorization": f"Bearer {token(tenant)}"}


async def test_the_official_client_completes_chats_and_streams(shared: Site) -> None:
    client = shared.client()
    answer = await client.completions.create(model=MODEL, prompt=[10, 11, 12], max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in chat]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_every_choice_of_n_arrives(shared: Site) -> None:
    client = shared.client()
    answer = await client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=3, n=4)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)


async def test_models_are_those_the_caller_may_use(shared: Site) -> None:
    mine = await shared.http.get("/v1/models", headers=bearer())
    (entry,) = mine.json()["data"]
    assert entry["id"] == MODEL
    assert entry["object"] == "model"
    assert entry["owned_by"]
    assert entry["created"] > 0
    assert entry["max_model_len"] == 256 * 16
    assert (await shared.http.get(f"/v1/models/{MODEL}", headers=bearer())).json() == entry
    assert (await shared.http.get("/v1/models", headers=bearer("beta"))).json()["data"] == []


async def test_a_model_that_is_not_allowed_is_as_unknown_as_one_that_is_not_there(shared: Site) -> None:
    hidden = await shared.complete("beta")
    unknown = await shared.complete("beta", model="echo2")
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.json()["error"]["code"] == unknown.json()["error"]["code"] == "model_not_found"
    assert hidden.json()["error"]["message"].replace(MODEL, "?") == unknown.json()["error"]["message"].replace(
        "echo2", "?"
    )
    assert (await shared.http.get(f"/v1/models/{MODEL}", headers=bearer("beta"))).status_code == 404


async def test_a_verified_tenant_that_is_not_listed_gets_403(shared: Site) -> None:
    answer = await shared.complete("stranger")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "unknown_tenant"


WALK = [
    ("GET", "/"),
    ("GET", "/v1"),
    ("GET", "/v1/chat/completions"),
    ("PUT", "/v1/completions"),
    ("DELETE", "/v1/models"),
    ("POST", "/v1/models"),
    ("POST", "/v1/chat/completions/"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/v1//completions"),
    ("POST", "/V1/completions"),
    ("POST", "/v1/%2e%2e/v1/completions"),
    ("POST", "/v1/completions%2f"),
    ("POST", "/v1/completions;x"),
    ("POST", "/chat/completions"),
    ("GET", "/v1/embeddings"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/tokenize"),
    ("GET", "/tokenize"),
    ("POST", "/TOKENIZE"),
    ("GET", "/v1/models/"),
    ("GET", "/metrics"),
    ("GET", "/admin/tenants"),
    ("POST", "/admin/policies"),
    ("DELETE", "/admin/tenants/alpha/cache"),
    ("GET", "/console"),
    ("GET", "/docs"),
    ("POST", "/openapi.json"),
    ("GET", "/openapi.yaml"),
    ("POST", "/generate"),
    ("POST", "/healthz"),
    ("OPTIONS", "/v1/completions"),
    ("TRACE", "/v1/completions"),
]


@pytest.mark.parametrize(("method", "path"), WALK, ids=[f"{method} {path}" for method, path in WALK])
async def test_everything_that_is_no_route_is_refused_in_our_shape(shared: Site, method: str, path: str) -> None:
    """gateway D7: default deny on every spelling and method, and nothing of the admin API on the public port."""
    url = httpx.URL(shared.url).copy_with(raw_path=path.encode())
    answer = await shared.http.request(method, url, headers=bearer(), json=COMPLETION)
    assert answer.status_code in (404, 405)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    if answer.status_code == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["chat", "completions", "responses"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer nonsense"},
        {"authorization": "Basic YTpi"},
        {"x-api-key": token("alpha")},
        {"authorization": ""},
    ],
    ids=["none", "nonsense", "basic", "other header", "empty"],
)
async def test_without_a_credential_nothing_is_served(
    shared: Site, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    """gateway D7: each route asks for itself."""
    answer = await shared.http.post(path, json=body, headers=headers)
    assert answer.status_code == 401


async def test_every_documented_route_but_three_wants_a_credential(shared: Site) -> None:
    """gateway D7: with and without the right body."""
    document = (await shared.http.get("/openapi.json")).json()
    open_to_all = {"/healthz", "/readyz", "/openapi.json"}
    assert open_to_all < document["paths"].keys()
    for path in document["paths"].keys() - open_to_all:
        for method in document["paths"][path]:
            url = path.replace("{model}", MODEL)
            for body in (None, {"model": MODEL, "prompt": "a", "input": "a", "tokens": [5]}):
                for headers in ({}, {"authorization": "Bearer nonsense"}):
                    answer = await shared.http.request(method, url, json=body, headers=headers)
                    assert answer.status_code == 401, (method, url)


CLIENT_SEES = {
    "connection", "content-length", "content-type", "date", "retry-after", "server", "transfer-encoding",
    "x-accel-buffering", "x-forebay-max-tokens", "x-request-id", "cache-control", *RATE,
}  # fmt: skip


async def test_no_header_names_a_worker(shared: Site) -> None:
    """gateway D9: who computed an answer, and where that is, would tell what others do."""
    names: set[str] = set()
    for stream in (False, True):
        for body in (COMPLETION, {**COMPLETION, "max_tokens": -1}, {**COMPLETION, "max_tokens": None}):
            answer = await shared.http.post("/v1/completions", json={**body, "stream": stream}, headers=bearer())
            names |= answer.headers.keys()
            text = repr(answer.headers) + (answer.text if answer.status_code != 200 else "")
            assert not [handle.name for handle in shared.dispatcher.workers if handle.name in text]
    assert names <= CLIENT_SEES


async def test_ranges_and_parts_of_a_body_are_nothing_here(shared: Site) -> None:
    """security 49: nobody parses them, so nobody can be kept busy with them."""
    ranges = "bytes=" + ",".join(f"{start}-{start}" for start in range(0, 9_000, 2))
    whole = await shared.http.get("/openapi.json")
    many = await shared.http.get("/openapi.json", headers={"range": ranges})
    assert (many.status_code, many.content) == (200, whole.content)
    more = await shared.http.get("/openapi.json", headers={"range": f"{ranges},{ranges},{ranges}"})
    assert more.status_code == 431
    part = b'--x\r\ncontent-disposition: form-data; name="f"\r\n\r\nv\r\n'
    headers = {**bearer(), "content-type": "multipart/form-data; boundary=x"}
    answer = await shared.http.post("/v1/completions", content=part * 20_000 + b"--x--\r\n", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_two_credentials_are_none(shared: Site) -> None:
    answer = await shared.http.post(
        "/v1/completions",
        json=COMPLETION,
        headers=[("authorization", f"Bearer {token('alpha')}"), ("authorization", f"Bearer {token('low')}")],
    )
    assert answer.status_code == 401


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["chat", "completions", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_rate_limit_headers_are_on_every_answer(
    shared: Site, path: str, body: dict[str, Any], stream: bool
) -> None:
    """gateway F1: every endpoint, streamed or not, served or refused; the figures are the reservation's."""
    ok = await shared.http.post(path, json={**body, "stream": stream}, headers=bearer())
    assert ok.status_code == 200
    assert [name for name in RATE if name not in ok.headers] == []
    assert ok.headers["x-ratelimit-limit-requests"] == "10000"
    assert 0 < int(ok.headers["x-ratelimit-remaining-tokens"]) < 1000000
    assert re.fullmatch(r"\d+\.\d{3}s", ok.headers["x-ratelimit-reset-tokens"])
    bad = await shared.http.post(path, json={**body, "max_tokens": -1, "stream": stream}, headers=bearer())
    assert bad.status_code == 400
    assert [name for name in RATE if name not in bad.headers] == []
    missing = await shared.http.post(path, json={**body, "model": "nope", "stream": stream}, headers=bearer())
    assert missing.status_code == 404
    assert [name for name in RATE if name not in missing.headers] == []
    await shared.http.post(path, json={**body, "stream": stream}, headers=bearer("narrow"))
    refused = await shared.http.post(path, json={**body, "stream": stream}, headers=bearer("narrow"))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert [name for name in RATE if name not in refused.headers] == []
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    models = await shared.http.get("/v1/models", headers=bearer())
    assert [name for name in RATE if name not in models.headers] == []


async def test_the_request_id_is_echoed_or_made(shared: Site) -> None:
    mine = await shared.complete(headers={"x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    assert mine.json()["id"] != "mine-1"
    async with shared.stream() as response:
        assert response.headers["x-request-id"].startswith("req_")
    assert (await shared.http.get("/healthz")).headers["x-request-id"]


async def test_the_same_request_id_twice_is_two_reservations(shared: Site) -> None:
    """A job's id is ours: a client that repeats its own id gets nothing for free."""
    headers = {"x-request-id": "again"}
    first = await shared.complete("slow", headers=headers)
    second = await shared.complete("slow", headers=headers)
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in (first, second)]
    assert left[1] < left[0]


FORGED: list[dict[str, Any]] = [
    {"tenant": "low"},
    {"user": "low"},
    {"cache_salt": "low"},
    {"priority": 99},
    {"class": "interactive"},
    {"metadata": {"tenant": "low"}},
]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["chat", "completions", "responses"])
@pytest.mark.parametrize("forged", FORGED, ids=[next(iter(f)) for f in FORGED])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_identity_comes_from_the_token_alone(
    shared: Site, path: str, body: dict[str, Any], forged: dict[str, Any], stream: bool
) -> None:
    """security 7, gateway B13: no header and no body field changes tenant, class or cache scope."""
    jobs: list[Any] = []
    queue = shared.dispatcher.queue
    offer = queue.offer
    queue.offer = lambda job, now: (jobs.append(job), offer(job, now))[1]  # type: ignore[method-assign]
    try:
        headers = {
            **bearer("low"),
            "x-tenant": "alpha",
            "x-tenant-id": "alpha",
            "x-forebay-tenant": "alpha",
            "x-forebay-class": "interactive",
            "x-forebay-priority": "9",
            "x-gateway-inference-fairness-id": "alpha",
            "x-gateway-inference-objective": "high",
            "x-user": "alpha",
        }
        forged = {key: "alpha" if value == "low" else value for key, value in forged.items()}
        answer = await shared.http.post(path, json={**body, **forged, "stream": stream}, headers=headers)
    finally:
        del queue.offer  # type: ignore[method-assign]
    assert answer.status_code == 200
    (job,) = jobs
    assert (job.tenant, job.service_class, job.priority) == ("low", "batch", 0)
    policies = shared.gateway.parts.runtime.current
    assert job.cache_scope == policies.cache_scope.scope(Principal(TenantId("low")), 0)


async def test_a_request_may_lower_its_class(shared: Site) -> None:
    """gateway B13: down is allowed, up is not (the other test)."""
    jobs: list[Any] = []
    queue = shared.dispatcher.queue
    offer = queue.offer
    queue.offer = lambda job, now: (jobs.append(job), offer(job, now))[1]  # type: ignore[method-assign]
    try:
        await shared.complete(headers={"x-forebay-class": "batch"})
    finally:
        del queue.offer  # type: ignore[method-assign]
    assert (jobs[0].service_class, jobs[0].priority) == ("batch", 0)


async def test_another_tenants_prefix_is_never_hit(shared: Site) -> None:
    """security 7: hits for the same tenant, none across, whatever the body says."""
    prompt = list(range(100, 164))
    await shared.complete("alpha", prompt=prompt)
    again = await shared.complete("alpha", prompt=prompt)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = await shared.complete("low", prompt=prompt, tenant="alpha", cache_salt="alpha", user="alpha")
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_errors_tell_nothing_of_the_inside(shared: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """security 57: no path, class, address or text of an exception, also of one nobody expected."""

    def broken(*_: object) -> None:
        raise RuntimeError(f"secret at {hex(id(shared))} in /etc/passwd")

    monkeypatch.setattr(shared.gateway.parts.models, "get", broken)
    answer = await shared.complete()
    assert answer.status_code == 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not re.search(r"0x|/etc|RuntimeError|secret|Traceback", answer.text)


async def test_the_answer_of_one_is_never_in_anothers(shared: Site) -> None:
    """security 17: 200 at once with unique markers, zero foreign ones."""

    async def one(marker: int) -> None:
        # Byte tokens: the answer is the prompt's text again, so each answer must consist of its own digits.
        text = f"<{marker:04d}>"
        if marker % 2:
            answer = await shared.complete(prompt=text, max_tokens=len(text), ignore_eos=True)
            assert answer.status_code == 200, answer.text
            said = answer.json()["choices"][0]["text"]
        else:
            async with shared.stream(prompt=text, max_tokens=len(text), ignore_eos=True) as response:
                assert response.status_code == 200
                found = events((await response.aread()).decode())
                said = "".join(event["choices"][0]["text"] for event in found[:-1])
        assert said == text

    await asyncio.gather(*(one(marker) for marker in range(200)))


async def test_openai_errors_are_what_the_client_expects(shared: Site) -> None:
    with pytest.raises(openai.NotFoundError):
        await shared.client().completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await shared.client().completions.create(model=MODEL, prompt="x", max_tokens=-3)
    assert caught.value.param == "max_tokens"
    stranger = openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="wrong", max_retries=0)
    async with stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_ready_only_with_files_and_a_worker(start: Start) -> None:
    """gateway E13: up at once, ready when tokenizer and worker are, and requests meanwhile get 503, not 404."""
    async with start(echo=Echo(load_s=1.0), ready=False) as site:
        assert (await site.http.get("/healthz")).status_code == 200
        starting = await site.http.get("/readyz")
        assert starting.status_code == 503
        assert starting.json() == {"status": "starting"}
        assert starting.headers["retry-after"]
        await until(lambda: site.gateway.ready, "ready")
        assert (await site.http.get("/readyz")).json() == {"status": "ready"}


async def test_a_model_whose_files_are_missing_is_not_ready_and_not_unknown(start: Start) -> None:
    """gateway E13."""
    async with start({"models": [{**pool(), "source": "not-there"}]}, ready=False) as site:
        answer = await site.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await site.http.get("/readyz")).status_code == 503


async def test_unlisted_tenants_live_on_the_defaults(start: Start) -> None:
    defaults = {"weight": 0.5, "limits": {"requests_per_minute": 7}}
    async with start({"tenant_defaults": defaults, "policies": {"auth": AUTH}}) as site:
        answer = await site.complete("stranger")
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "7"
