"""HTTP in front of sessions: routes, keys, and delivery of replies. One handler for streamed and plain answers.

What holds: a reply's closing event (or plain body) is written only after its call is on disk, and a reply counts as
flushed only once that event went into a connection that was still open. Whatever goes wrong is answered in the client's
own error format and noted in its session.

A client that closes its half of the connection counts as gone: a full close looks the same from here.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
import time
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from polarlike.dialects.base import Dialect, DialectError, ReplyMeta
from polarlike.engines.base import Engine
from polarlike.proxy.generation import Generation, before_stop
from polarlike.proxy.session import Session, key_digest, off_loop
from polarlike.proxy.settings import SessionSettings
from polarlike.records import Delivery, PolarError, UsageError
from polarlike.store import Store
from polarlike.templates import TemplateError

MAX_BODY = 100 * 2**20
_BODY_S = 300.0  # seconds a request body may take to arrive
_LIVE_INTERVAL_S = 0.05  # how often a live stream looks for new text: parsing costs, and nobody reads faster

log = logging.getLogger(__name__)


class Proxy:
    """Sessions over one engine and one store. `dialects` are served under /v1 and under /s/{session}/v1."""

    def __init__(self, engine: Engine, store: Store, dialects: list[Dialect]):
        self.engine, self.store, self.dialects = engine, store, dialects
        self.sessions: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._runners: dict[str, list[web.AppRunner]] = {}

    # ------------------------------------------------------------ sessions

    async def open_session(self, settings: SessionSettings, rollout_id: str = "") -> Session:
        session = Session(self.engine, self.store, settings, rollout_id)
        await self.store.put_session(session.session_id, rollout_id, settings.model_dump(mode="json"))
        self.sessions[session.session_id] = session
        self._by_key[key_digest(session.key)] = session
        return session

    async def close_session(self, session: Session) -> None:
        """Revokes the key, stops sampling, closes the session's own sites."""
        self._by_key.pop(key_digest(session.key), None)
        self.sessions.pop(session.session_id, None)
        await session.close()
        for runner in self._runners.pop(session.session_id, []):
            await runner.cleanup()
        await session.settle()  # of replies whose last bytes left while the sites were closing

    async def serve_session(self, session: Session, sock: socket.socket) -> None:
        """A site on one listening socket that serves this session and no other."""
        runner = await _runner(self.app(session))
        self._runners.setdefault(session.session_id, []).append(runner)
        await web.SockSite(runner, sock).start()

    async def close(self) -> None:
        for session in list(self.sessions.values()):
            await self.close_session(session)

    # ------------------------------------------------------------ HTTP

    def app(self, only: Session | None = None) -> web.Application:
        """The model routes. `only`: the one session whose key is taken."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors])
        for prefix in ("", "/s/{session}"):
            app.router.add_get(prefix + "/v1/models", self._handler(only, None))
            for dialect in self.dialects:
                app.router.add_post(prefix + "/v1" + dialect.path, self._handler(only, dialect))
        return app

    def _handler(self, only: Session | None, dialect: Dialect | None) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request, only)
            if dialect is None:
                return self._models()
            return await self._answer(request, session, dialect)

        return handle

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Every error in the client's own format. Paths we do not know get the first dialect's."""
        dialect = next((d for d in self.dialects if request.path.endswith(d.path)), self.dialects[0])
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except DialectError as e:
            return _json(e.status, dialect.error(e.status, str(e), kind=e.kind, param=e.param, code=e.code))
        except TemplateError as e:
            return _json(400, dialect.error(400, str(e)))
        except web.HTTPRequestEntityTooLarge:
            return _json(413, dialect.error(413, f"The request body is larger than {MAX_BODY // 2**20} MB."))
        except web.HTTPMethodNotAllowed as e:
            allowed = ", ".join(sorted(e.allowed_methods))
            said = dialect.error(405, f"{request.path} takes {allowed}, not {request.method}.")
            return _json(405, said, {"Allow": allowed})
        except web.HTTPException as e:
            return _json(e.status, dialect.error(e.status, f"There is no {request.method} {request.path} here."))
        except PolarError as e:
            return _json(500, dialect.error(500, str(e)))
        except ConnectionError:  # the client has gone: there is nobody to answer
            raise
        except Exception as e:
            log.exception("%s %s failed", request.method, request.path)
            return _json(
                500, dialect.error(500, f"The proxy failed on this request ({type(e).__name__}); see its log.")
            )

    def _session(self, request: web.Request, only: Session | None) -> Session:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._by_key.get(key_digest(key)) if key else None
        named = request.match_info.get("session")
        if session is None or (only is not None and session is not only):
            raise DialectError(401, "This key opens no session; use the session's own key.", code="invalid_api_key")
        if named is not None and not hmac.compare_digest(
            named.encode(errors="surrogateescape"), session.session_id.encode()
        ):
            raise DialectError(401, "This key belongs to another session than the path.", code="invalid_api_key")
        return session

    def _models(self) -> web.Response:
        model = {"id": self.engine.model_name, "object": "model", "created": 0, "owned_by": "polarlike"}
        return _json(200, orjson.dumps({"object": "list", "data": [model]}))

    async def _answer(self, request: web.Request, session: Session, dialect: Dialect) -> web.StreamResponse:
        try:
            body = await _body(request)
            asked = await off_loop(len(body), dialect.parse, body)
            marked = _retry_count(request) > 0
            generation = await session.generation(asked, body, dialect=dialect.name, marked_retry=marked)
        except (DialectError, TemplateError) as e:
            session.refusals.append(str(e))
            raise
        meta = ReplyMeta("chatcmpl-" + generation.call_id, asked.model, int(generation.created), asked.include_usage)
        try:
            if asked.stream:
                return await self._stream(request, session, dialect, generation, meta)
            return await self._plain(request, session, dialect, generation, meta)
        finally:
            generation.disconnect()

    async def _plain(
        self, request: web.Request, session: Session, dialect: Dialect, generation: Generation, meta: ReplyMeta
    ) -> web.StreamResponse:
        await generation.done.wait()
        if generation.error:
            return _json(500, dialect.error(500, generation.error))
        body = dialect.plain(meta, generation.reply, generation.finish_reason, generation.usage)
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
        await response.prepare(request)
        await self._close_with(request, response, session, generation, [body])
        return response

    async def _stream(
        self, request: web.Request, session: Session, dialect: Dialect, generation: Generation, meta: ReplyMeta
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(dialect.opening(meta))
        sent = ("", "")
        last_write = time.monotonic()
        while not generation.done.is_set():
            news = await generation.changed(session.settings.keep_alive_s)
            text = sent
            if session.settings.streaming == "live" and not generation.done.is_set():
                text = self._live(session, generation, sent)
            if text != sent:
                reasoning, content = text[0][len(sent[0]) :], text[1][len(sent[1]) :]
                await response.write(dialect.delta(meta, reasoning=reasoning, content=content))
                sent, last_write = text, time.monotonic()
                await asyncio.sleep(_LIVE_INTERVAL_S)
            elif not news or time.monotonic() - last_write > session.settings.keep_alive_s:
                await response.write(dialect.keep_alive())
                last_write = time.monotonic()
        error = generation.error
        if not error and not (
            generation.reply.get("reasoning_content", "").startswith(sent[0])
            and generation.reply.get("content", "").startswith(sent[1])
        ):
            error = "The reply turned out to be other than what was streamed of it; ask again."
            session.failures.append(f"{generation.call_id}: {error}")
        if error:
            await response.write(dialect.error_event(error))
            await response.write_eof()
            return response
        closing = list(dialect.closing(meta, generation.reply, generation.finish_reason, generation.usage, sent=sent))
        await self._close_with(request, response, session, generation, closing)
        return response

    @staticmethod
    def _live(session: Session, generation: Generation, sent: tuple[str, str]) -> tuple[str, str]:
        """(reasoning, content) that may be shown by now; what was sent already never changes under it."""
        template = session.engine.template
        ids = generation.completion_ids()
        if template is None or not ids.size:
            return sent
        reasoning, content = template.live_text(generation.plan.prompt_ids, ids)
        content = before_stop(content, generation.sampling.stop, more=True).rstrip()
        if not reasoning.startswith(sent[0]) or not content.startswith(sent[1]):
            return sent
        return reasoning, content

    @staticmethod
    async def _close_with(
        request: web.Request,
        response: web.StreamResponse,
        session: Session,
        generation: Generation,
        pieces: list[bytes],
    ) -> None:
        """Writes the end of a reply and records whether it went into an open connection."""
        try:
            for piece in pieces:
                await response.write(piece)
            await response.write_eof()
            alive = request.transport is not None and not request.transport.is_closing()
        except (ConnectionError, asyncio.CancelledError):
            if generation.delivery is not Delivery.FLUSHED:
                session.delivered(generation, Delivery.LOST)
            raise
        if alive or generation.delivery is not Delivery.FLUSHED:
            session.delivered(generation, Delivery.FLUSHED if alive else Delivery.LOST)


async def _runner(app: web.Application) -> web.AppRunner:
    # handler_cancellation: without it a client's leaving is seen only at the next write.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    return runner


async def listen(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serves an app on host:port (0: any free port); the port. Raises UsageError where the port is taken."""
    runner = await _runner(app)
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
    except OSError as e:
        await runner.cleanup()
        raise UsageError(f"Cannot listen on {host}:{port} ({e.strerror}); choose another port with --port.") from e
    sockets = site._server.sockets if site._server else []  # type: ignore[attr-defined]
    return runner, int(sockets[0].getsockname()[1])


async def _body(request: web.Request) -> bytes:
    """The whole request body, decompressed. Raises DialectError where it does not arrive or does not decompress."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError as e:
        raise DialectError(408, f"The request body did not arrive within {_BODY_S:g} seconds.") from e
    except (web.RequestPayloadError, HttpProcessingError) as e:
        raise DialectError(400, "The request body is broken off or not encoded as its headers say.") from e


def _retry_count(request: web.Request) -> int:
    """Stainless-made SDKs (openai, anthropic) number their retries."""
    value = request.headers.get("x-stainless-retry-count", "0")
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else 0


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
