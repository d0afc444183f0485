"""One request at the server, from its body to the last word about it.

Rules
- Always asked for as a stream (but for embeddings), so that what ran is known when the caller leaves, and closing the
  connection tells the server to stop.
- A status other than 200 before the body becomes an end of its own kind; the server's words go nowhere, not even into
  the log: they may quote the prompt.
- A stream that breaks off is a failure, never an end that was made up. One that stops after every choice had its end
  counts as whole: some servers leave out ``[DONE]``.
- Figures go with the end: prompt and cached tokens as the server counted; where it did not get that far, the prompt
  as the gateway did, since it was computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from forebay_openai_upstream.answer import Answer, ReportedError, ServerError
from forebay_openai_upstream.config import UpstreamConfig
from forebay_openai_upstream.http import READ_SIZE, Connections
from forebay_openai_upstream.refusals import Refused, by_status, in_band
from forebay_openai_upstream.sse import EventReader
from workers.protocol import Ask, Generate, SequenceOutput, Timings

PATHS = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}
MAX_ERROR_BODY = 2**16
MAX_EMBEDDINGS = 64 * 2**20
MAX_WHOLE = 16 * 2**20
"""Of an answer in one piece, from a server that does not stream."""
FAREWELL_S = 2.0
"""After every choice's end: how long to wait for the figures and the end of the stream."""

Report = Callable[[list[SequenceOutput]], None]


class Call:
    """Runs one ``Generate``. ``run`` it as a task; cancelling that ends the request at the server."""

    def __init__(
        self, message: Generate, config: UpstreamConfig, connections: Connections, report: Report, model: str
    ) -> None:
        self._message = message
        self._config = config
        self._connections = connections
        self._report = report
        self._model = model
        self._answer = Answer(message.n, max_tokens=message.max_tokens, max_prompt=config.max_context)
        self._open = set(range(message.n))
        """Choices whose end was not reported yet."""
        self._received_ns = time.time_ns()
        self._sent_ns = self._first_ns = 0
        self._accepted = False
        """The server took the request: its prompt is computed there."""

    async def run(self) -> str | None:
        """Until every choice's end is reported. Returns what went wrong, for the operator's log."""
        try:
            await self._talk()
        except Refused as refusal:
            self._end("error", refusal.code, refusal.retry_after_s, refusal.param)
            return str(refusal)
        except TimeoutError as error:  # aiohttp's own, for the connection
            self._end("error", "upstream_failed")
            return f"no connection within {self._config.connect_s:g} s ({type(error).__name__})"
        except (aiohttp.ClientError, HttpProcessingError, ServerError, ValueError, OSError) as error:
            self._end("error", "upstream_failed")
            return f"{type(error).__name__}: {error}" if isinstance(error, ServerError) else type(error).__name__
        except Exception as error:
            self._end("error", "internal")
            return type(error).__name__
        self._end(None)
        return None

    def abandon(self) -> None:
        """It was cancelled: what is open ends. Does nothing after an end."""
        self._end("cancelled")

    def drop(self, index: int) -> bool:
        """One choice is not wanted any more (a stop string): it ends here. True when none is left."""
        if index in self._open:
            self._open.discard(index)
            self._answer.choices[index].dropped = True
            self._report([self._output(index, final=True, finish="cancelled")])
        return not self._open

    async def _talk(self) -> None:
        ask = self._message.ask
        if ask is None:
            raise Refused("bad_request", "the gateway sent no text along")
        if ask.endpoint not in self._config.endpoints:
            raise Refused("bad_request", f"the server offers no {ask.endpoint}: see endpoints")
        if self._message.beams is not None:
            raise Refused("bad_request", "beam search: servers that do not know it would draw instead")
        body = msgspec.json.encode(self._body(ask))
        fields = {*ask.body, self._config.max_tokens_field}
        try:
            async with asyncio.timeout(self._config.connect_s + self._config.first_token_s) as limit:
                self._sent_ns = time.time_ns()

                def connected() -> None:
                    limit.reschedule(self._soon(self._config.first_token_s))

                path = PATHS[ask.endpoint]
                async with self._connections.post(path, body, self._trace(), connected) as response:
                    if response.status != 200:
                        raise await _refusal(response, fields)
                    self._accepted = True
                    _require_plain(response)
                    if ask.endpoint == "embeddings":
                        self._answer.take_embeddings(await _whole(response, MAX_EMBEDDINGS))
                    else:
                        await self._read(response, limit)
        except ReportedError as error:
            if self._answer.begun:
                raise
            raise in_band(error.said, fields) from None
        except TimeoutError as error:
            if self._answer.finished:
                return  # only the figures behind the ends did not come
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise
            what = "pieces stopped coming" if self._answer.begun else "no output"
            raise Refused("upstream_timeout", f"{what} in time") from None

    async def _read(self, response: aiohttp.ClientResponse, limit: asyncio.Timeout) -> None:
        """Whatever it is labelled: JSON is an answer in one piece, or an error; all else has to be events."""
        data = await response.content.read(READ_SIZE)
        while data.isspace():
            data = await response.content.read(READ_SIZE)
        if data.lstrip().startswith(b"{"):
            self._answer.take_whole(data + await _whole(response, MAX_WHOLE))
            self._progress()
        else:
            await self._stream(response, data, limit)
        if self._answer.short:
            raise Refused("bad_request", "it made fewer choices than it was asked for", param="n")
        if not self._answer.finished:
            raise ServerError("the stream ended before every choice had its end")

    async def _stream(self, response: aiohttp.ClientResponse, data: bytes, limit: asyncio.Timeout) -> None:
        reader, answer, seen, ended = EventReader(), self._answer, 0, False
        while data:
            done = False
            for event in reader.feed(data):
                if event == b"[DONE]":
                    done = True
                    break
                answer.take(event)
            self._progress()
            if done:
                break
            # Only what belongs to the answer counts as going on: a server may send comments for ever.
            if answer.finished and not ended:
                ended = True
                limit.reschedule(self._soon(FAREWELL_S))
            elif answer.begun and not ended and answer.pieces > seen:
                limit.reschedule(self._soon(self._config.between_chunks_s))
            seen = answer.pieces
            try:
                data = await response.content.read(READ_SIZE)
            except (aiohttp.ClientError, OSError, HttpProcessingError):
                if answer.finished:
                    return
                raise

    def _body(self, ask: Ask) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {**ask.body, "model": config.model or self._model}
        if ask.endpoint != "embeddings":
            body["stream"] = True
            if config.usage:
                body["stream_options"] = {"include_usage": True}
        if ask.endpoint == "chat" and config.max_tokens_field != "max_tokens":
            body[config.max_tokens_field] = body.pop("max_tokens")
        if config.cache_salt and self._message.scope:
            body["cache_salt"] = self._message.scope.hex()
        return body | config.extra_body

    def _trace(self) -> dict[str, str]:
        wanted = ("traceparent", "tracestate") if self._config.forward_trace else ()
        return {name: value for name in wanted if (value := self._message.trace.get(name))}

    @staticmethod
    def _soon(seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds

    def _progress(self) -> None:
        """Report what is new; ends wait for the figures."""
        news = [index for index in sorted(self._open) if self._answer.choices[index].news]
        if not news:
            return
        if not self._first_ns:
            self._first_ns = time.time_ns()
        self._report([self._output(index) for index in news])

    def _end(
        self, finish: str | None, error: str | None = None, retry_after_s: float | None = None, param: str = ""
    ) -> None:
        """The last word on every open choice: its own end, or ``finish`` for those that have none."""
        outputs = []
        for index in sorted(self._open):
            own = self._answer.choices[index].finish if finish != "cancelled" and error is None else None
            end = own or finish or "error"
            code = None if end != "error" else error or "upstream_failed"
            wait_s, field = (retry_after_s, param) if code else (None, "")
            outputs.append(
                self._output(index, final=True, finish=end, error=code, retry_after_s=wait_s, error_param=field)
            )
        self._open.clear()
        if outputs:
            self._report(outputs)

    def _output(
        self,
        index: int,
        *,
        final: bool = False,
        finish: Any = None,
        error: str | None = None,
        retry_after_s: float | None = None,
        error_param: str = "",
    ) -> SequenceOutput:
        choice, answer = self._answer.choices[index], self._answer
        text, choice.text = "".join(choice.text), []
        logprobs, choice.logprobs = choice.logprobs, []
        choice.news = False
        lead, known = index == 0, answer.prompt_tokens
        prompt = known or (len(self._message.tokens) if final and self._accepted else 0)
        cached = answer.cached_tokens if known else 0
        return SequenceOutput(
            id=self._message.id,
            index=index,
            text=text if text or choice.tokens or error is None else None,
            output_tokens=choice.tokens,
            prompt_computed=prompt - cached if lead else 0,
            prompt_cached=cached if lead else 0,
            prompt_tokens=known if lead else 0,
            text_logprobs=logprobs,
            finish=finish,
            error=error,
            retry_after_s=retry_after_s,
            error_param=error_param,
            timings=self._timings() if final else None,
        )

    def _timings(self) -> Timings:
        return Timings(self._received_ns, self._sent_ns, self._first_ns, time.time_ns())


async def _refusal(response: aiohttp.ClientResponse, sent: Collection[str]) -> Refused:
    """What a status other than 200 means here."""
    try:
        body = await response.content.read(MAX_ERROR_BODY)
    except (aiohttp.ClientError, OSError, HttpProcessingError):
        body = b""
    return by_status(response.status, body, response.headers.get("retry-after"), sent)


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """A body that is no stream. Raises ServerError for one of more than ``most`` bytes."""
    data = bytearray()
    while part := await response.content.read(READ_SIZE):
        data += part
        if len(data) > most:
            raise ServerError(f"an answer of more than {most} bytes")
    return bytes(data)


def _require_plain(response: aiohttp.ClientResponse) -> None:
    """Nothing here inflates what comes. Raises ServerError."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ServerError("it compresses its answer, though it was asked not to")
