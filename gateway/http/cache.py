"""The admin API of the caches: purges and their receipts, public prefixes, how long what may live.

    DELETE /admin/tenants/{tenant}/cache[?user=…&group=…&tag=…]     purge; without a query all of the tenant
    GET    /admin/cache                                             epochs, retention times, public prefixes
    GET    /admin/cache/receipts/{id}                               a receipt as it stands now
    POST   /admin/cache/receipts/verify                             whether a receipt is this gateway's
    POST   /admin/public-prefixes   {model, text | messages, name}  register
    DELETE /admin/public-prefixes/{id}                              unregister, and zero its blocks

A purge says what it did: 200 when every block is zeroed, 202 while something is left (the receipt says what).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import ApiError, bad_request, unavailable
from gateway.http.jsonfields import field, read, split
from gateway.http.schemas import ROLES
from gateway.http.trail import note
from gateway.labels import MAX_TAG_CHARS, Subject
from gateway.models import ModelHandle
from gateway.public_prefixes import MAX_NAME_CHARS, PublicPrefix, TooManyPrefixesError
from gateway.purge import Receipt, valid
from policies.types import TenantId
from workers.engine.block_hash import chain_keys
from workers.tokenizer import ChatTemplateError, EncodeError, Tokenizer

if TYPE_CHECKING:
    from gateway.service import Gateway

MAX_SUBJECTS = 64
_KINDS = ("user", "group", "tag")


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


_TEXT = field(str, lambda value: None if value else "is empty")
_NAME = field(str, lambda value: None if len(value) <= MAX_NAME_CHARS else f"has more than {MAX_NAME_CHARS} characters")
_MESSAGES = field(
    list[_Message],
    lambda value: None if value and all(m.role in ROLES for m in value) else f"takes messages of {', '.join(ROLES)}",
)
_FIELDS = ("model", "text", "messages", "name")


class CacheApi:
    """The endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parts = gateway.parts

    def routes(self) -> list[Route]:
        """For the admin application."""
        return [
            Route("/admin/tenants/{tenant}/cache", self.purge, methods=["DELETE"]),
            Route("/admin/cache", self.show, methods=["GET"]),
            Route("/admin/cache/receipts/verify", self.verify, methods=["POST"]),
            Route("/admin/cache/receipts/{receipt}", self.receipt, methods=["GET"]),
            Route("/admin/public-prefixes", self.register, methods=["POST"]),
            Route("/admin/public-prefixes/{prefix}", self.unregister, methods=["DELETE"]),
        ]

    async def purge(self, request: Request) -> Response:
        tenant = TenantId(request.path_params["tenant"])
        if not self._parts.tenants.knows(tenant):
            raise _not_found("There is no such tenant.", "unknown_tenant", "tenant")
        subject = _subject(tenant, request)
        self._parts.pipeline.replays.forget(tenant)
        receipt = await self._parts.purger.purge(subject)
        await note(self._gateway, request, "cache.purge", f"tenant:{tenant}", after=receipt.body())
        return _answer(receipt)

    async def receipt(self, request: Request) -> Response:
        found = self._parts.purger.receipt(request.path_params["receipt"])
        if found is None:
            raise _not_found("There is no such receipt, or it was long ago.", "unknown_receipt", "receipt")
        return _answer(found)

    async def verify(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise bad_request("Send a receipt as it was answered, a JSON object.", code="invalid_json") from None
        return JSONResponse({"valid": valid(body, self._parts.secret)})

    async def show(self, _: Request) -> Response:
        tenants = self._parts.tenants
        return JSONResponse(
            {
                "cache_scope": self._parts.runtime.current.uses["cache_scope"].use,
                "tenants": [
                    {
                        "id": tenant.id,
                        "epoch": tenant.epoch,
                        "retention_s": tenant.privacy.cache_retention_s,
                        "scopes_to_sweep": len(tenants.outdated(tenant.id)),
                    }
                    for tenant in tenants.listed()
                ],
                "public_prefixes": [self._described(prefix) for prefix in self._parts.public_prefixes.listed()],
            }
        )

    async def register(self, request: Request) -> Response:
        fields = split(await request.body())
        _known(fields, _FIELDS, "is no field; there are")
        model, name = self._model(read(fields, "model", _TEXT, "")), read(fields, "name", _NAME, "")
        text, messages = read(fields, "text", _TEXT, None), read(fields, "messages", _MESSAGES, None)
        if (text is None) == (messages is None):
            raise bad_request("Send either text (of completions) or messages (of chats).", param="text")
        tokens = await asyncio.to_thread(_encoded, _tokenizer(model), text, messages)
        if len(tokens) < model.block_size:
            raise bad_request(
                f"The prefix has {len(tokens)} tokens; less than one block of {model.block_size} cannot be shared.",
                param="text" if messages is None else "messages",
            )
        try:
            kept = await self._parts.public_prefixes.add(PublicPrefix.of(model.name, name, tokens))
        except TooManyPrefixesError as error:
            raise ApiError(409, f"{error}.", type="invalid_request_error", code="too_many_prefixes") from None
        except OSError:
            raise _unwritable() from None
        shown = self._described(kept)
        await note(self._gateway, request, "public_prefix.add", f"prefix:{kept.id}", after=shown)
        return JSONResponse(shown, 201)

    async def unregister(self, request: Request) -> Response:
        try:
            gone = await self._parts.public_prefixes.remove(request.path_params["prefix"])
        except OSError:
            raise _unwritable() from None
        if gone is None:
            raise _not_found("There is no such public prefix.", "unknown_prefix", "prefix")
        receipt = await self._parts.purger.purge_keys(gone.id, gone.model, self._own_keys(gone))
        named = {"model": gone.model, "name": gone.name, "tokens": len(gone.tokens)}
        await note(
            self._gateway, request, "public_prefix.remove", f"prefix:{gone.id}", before=named, after=receipt.body()
        )
        return _answer(receipt)

    def _own_keys(self, gone: PublicPrefix) -> list[bytes]:
        """Keys of its blocks that lie in no other public prefix, under the model itself and under every adapter."""
        model = self._parts.models.handle(gone.model)
        shared = self._parts.public_prefixes.match(gone.model, gone.tokens) // model.block_size
        found: list[bytes] = []
        for adapter in (None, *self._parts.models.adapters.contents(gone.model)):
            size, length = model.block_size, len(gone.tokens)
            keys = chain_keys(b"", model.revision, adapter, gone.tokens, size, public_tokens=length)
            found += keys[shared:]
        return found

    def _model(self, name: str) -> ModelHandle:
        try:
            return self._parts.models.handle(name)
        except KeyError:
            message = f"model: {name[:64]!r} is not served here. GET /v1/models lists what is."
            raise _not_found(message, "model_not_found", "model") from None

    def _described(self, prefix: PublicPrefix) -> Mapping[str, Any]:
        try:
            block_size = self._parts.models.handle(prefix.model).block_size
        except KeyError:  # its model was taken out of the configuration
            block_size = 0
        return {
            "id": prefix.id,
            "model": prefix.model,
            "name": prefix.name,
            "created": round(prefix.created, 3),
            "tokens": len(prefix.tokens),
            "shared_blocks": len(prefix.tokens) // block_size if block_size else 0,
        }


def _subject(tenant: TenantId, request: Request) -> Subject:
    query = request.query_params
    _known(query, _KINDS, "is nothing to purge by; there are")
    named = {kind: tuple(dict.fromkeys(query.getlist(kind))) for kind in _KINDS}
    for kind, names in named.items():
        if any(not name or len(name) > 512 for name in names):
            raise bad_request(f"{kind} is empty or longer than 512 characters.", param=kind)
        if kind == "tag" and any(name != name.strip() or "," in name or len(name) > MAX_TAG_CHARS for name in names):
            raise bad_request(f"tag: a tag has at most {MAX_TAG_CHARS} characters, none a comma.", param=kind)
    if sum(map(len, named.values())) > MAX_SUBJECTS:
        raise bad_request(f"Name at most {MAX_SUBJECTS} at once.", param="user")
    return Subject(tenant, named["user"], named["group"], named["tag"])


def _known(names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raises ApiError 400 for a name that is none of ``known``."""
    for name in names:
        if name not in known:
            raise bad_request(f"{name[:64]!r} {what} {', '.join(known)}.", param=name[:64])


def _answer(receipt: Receipt) -> Response:
    return JSONResponse(receipt.body(), 200 if receipt.complete else 202)


def _tokenizer(model: ModelHandle) -> Tokenizer:
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, Tokenizer):
        raise bad_request(f"model: upstreams alone run {model.name!r}; nothing of it is cached here.", param="model")
    return tokenizer


def _encoded(tokenizer: Tokenizer, text: str | None, messages: list[_Message] | None) -> list[int]:
    try:
        if messages is None:
            return tokenizer.encode_text(text or "")
        chat = [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in messages]
        return tokenizer.encode_segments(tokenizer.chat_segments(chat, add_generation_prompt=False))
    except (ChatTemplateError, EncodeError) as error:
        said = str(error)
        raise bad_request(f"{said[:1].upper()}{said[1:]}.", param="text" if messages is None else "messages") from None


def _unwritable() -> ApiError:
    return unavailable("The state folder (state.path) cannot be written; nothing has changed.", "state_unwritable")


def _not_found(message: str, code: str, param: str) -> ApiError:
    return ApiError(404, message, type="invalid_request_error", code=code, param=param)
