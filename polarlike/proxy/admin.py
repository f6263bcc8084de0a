"""The control API of `polar serve`: sessions by HTTP, on a socket and with a key of its own, which no sandbox gets."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from polarlike.proxy.server import Proxy
from polarlike.proxy.settings import SessionSettings
from polarlike.records import Call

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_app(proxy: Proxy, key: str, base_url: Callable[[str], str]) -> web.Application:
    """base_url: session id to the URL a harness is pointed at."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, key.encode()):
            return _json({"error": "the admin key is missing or wrong"}, 401)
        try:
            return await handler(request)
        except web.HTTPException as e:
            return _json({"error": f"there is no {request.method} {request.path} here"}, e.status)

    async def create(request: web.Request) -> web.Response:
        try:
            settings = SessionSettings.model_validate_json(await request.read() or b"{}")
        except ValidationError as e:
            first = e.errors()[0]
            return _json({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400)
        session = await proxy.open_session(settings)
        url = base_url(session.session_id)
        return _json({"session_id": session.session_id, "key": session.key, "base_url": url}, 201)

    async def listing(request: web.Request) -> web.Response:
        return _json([{"session_id": s.session_id, "calls": s.calls} for s in proxy.sessions.values()])

    async def calls(request: web.Request) -> web.Response:
        session_id = request.match_info["session"]
        found = await asyncio.to_thread(proxy.store.calls, session_id)
        return _json([_call(c) for c in found])

    async def delete(request: web.Request) -> web.Response:
        session = proxy.sessions.get(request.match_info["session"])
        if session is None:
            return _json({"error": "there is no such open session"}, 404)
        await proxy.close_session(session)
        return _json({"session_id": session.session_id, "calls": session.calls})

    app = web.Application(middlewares=[guard])
    app.router.add_post("/sessions", create)
    app.router.add_get("/sessions", listing)
    app.router.add_get("/sessions/{session}/calls", calls)
    app.router.add_delete("/sessions/{session}", delete)
    return app


def _call(call: Call) -> dict[str, Any]:
    """A call as the API tells it: token arrays as lists, prompts as what they add to their parent."""
    return {
        "call_id": call.call_id,
        "parent_id": call.parent_id,
        "cause": call.cause.value,
        "model": call.model,
        "suffix_ids": call.suffix_ids.tolist(),
        "completion_ids": call.completion_ids.tolist(),
        "logprobs": call.logprobs.tolist(),
        "versions": call.versions.tolist(),
        "new_messages": call.new_messages,
        "reply": call.reply,
        "finish_reason": call.finish_reason,
        "delivery": call.delivery.value,
    }


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
