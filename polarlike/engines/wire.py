"""HTTP to an inference server: JSON calls, and replies that come as server-sent events.

It knows connections and their failures; nothing of tokens. What holds: a stream that its reader leaves, or that `cut`
ends from outside, closes its connection, by which the server stops sampling; a call whose kept-alive connection turns
out to be closed before anything was answered is made once more (a server closes it after an answer of 500).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import orjson

from polarlike.engines.base import EngineError
from polarlike.records import UsageError

API_KEY = "POLAR_ENGINE_API_KEY"
"""Environment variable with the server's key, where it wants one; in a config file it would be written to every run."""


class Broken(EngineError):
    """The connection broke, or the server took too long."""


class Refused(EngineError):
    """The server answered with an error. status: its HTTP status."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class Cut(EngineError):
    """The stream was ended by `Stream.cut`."""


def server_url(argument: str, kind: str) -> str:
    """The root of a server's URL. Raises UsageError."""
    url = argument if "://" in argument else f"http://{argument}"
    if not url.startswith(("http://", "https://")) or len(url.split("://")[1]) < 2:
        raise UsageError(f"{argument!r} is no URL; give the server's, for example {kind}:http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Wire:
    """One server. name: what it is called in errors. timeout_s: most seconds without a byte from it."""

    def __init__(self, url: str, name: str, *, timeout_s: float):
        self.url, self._name, self._timeout_s = url, name, timeout_s
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Called in the event loop that will use it."""
        key = os.environ.get(API_KEY)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._timeout_s),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON, or its text where it is none. Raises EngineError."""
        return await self._call("POST", path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        return Stream(self, path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        for attempt in (0, 1):
            try:
                async with await self.request(method, path, body) as response:
                    data = await response.read()
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as e:
                if attempt or not _was_stale(e):
                    raise self.broken(e) from e
                continue
            if response.status >= 400:
                raise self._refused(response.status, path, data)
            return _json(data)
        raise AssertionError("unreachable")

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None) -> aiohttp.ClientResponse:
        if self._session is None:
            raise EngineError(f"The {self._name} engine has not been started; await its start() first.")
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": "application/json"} if data is not None else None
        return await self._session.request(method, self.url + path, data=data, headers=headers)

    def broken(self, e: BaseException) -> Broken:
        if isinstance(e, aiohttp.ClientConnectorError):
            return Broken(f"There is no {self._name} server at {self.url} ({e.os_error.strerror}); start it there.")
        if isinstance(e, TimeoutError):
            return Broken(f"The {self._name} server at {self.url} sent nothing for {self._timeout_s:g} s; see its log.")
        return Broken(f"The connection to the {self._name} server at {self.url} broke ({e or type(e).__name__}).")

    async def refused(self, response: aiohttp.ClientResponse, path: str) -> Refused:
        return self._refused(response.status, path, await response.read())

    def _refused(self, status: int, path: str, data: bytes) -> Refused:
        return Refused(f"The {self._name} server answered {status} to {path}: {message_of(_json(data))}", status)


class Stream:
    """One streamed reply, read once through `events`."""

    def __init__(self, wire: Wire, path: str, body: Mapping[str, Any]):
        self._wire, self._path, self._body = wire, path, body
        self._opening: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._was_cut = False
        self.closed = asyncio.Event()

    def cut(self) -> None:
        """Closes the connection at once, whoever waits for it; its reader gets `Cut`."""
        self._was_cut = True
        if self._response is not None:
            self._response.close()
            self.closed.set()
        elif self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())
        else:
            self.closed.set()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Each event's JSON object, to the end of the body. Raises Broken, Refused or Cut."""
        try:
            response = await self._open()
            if response.status >= 400:
                raise await self._wire.refused(response, self._path)
            pending = b""
            async for block in response.content.iter_any():
                *lines, pending = (pending + block).split(b"\n")
                for line in lines:
                    event = _event(line)
                    if event is None:
                        continue
                    if self._was_cut:
                        raise Cut("cut")
                    yield event
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as e:
            if self._was_cut:
                raise Cut("cut") from e
            raise self._wire.broken(e) from e
        finally:
            if self._response is not None:
                self._response.close()  # a body read to its end has given its connection back already
            self.closed.set()

    async def _open(self) -> aiohttp.ClientResponse:
        if self._was_cut:
            raise Cut("cut")
        async with asyncio.timeout(None) as self._opening:
            self._response = await self._wire.request("POST", self._path, self._body)
        self._opening = None
        if self._was_cut:  # as the answer came
            raise Cut("cut")
        return self._response


def _was_stale(e: BaseException) -> bool:
    return isinstance(e, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError) and not isinstance(
        e, aiohttp.ClientConnectorError
    )


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a stream's line; None for lines that carry nothing."""
    data = line[5:].strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    event = _json(data)
    if not isinstance(event, dict):
        raise EngineError("The server's stream holds a line that is no JSON object; see the server's log.")
    return event


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")


def message_of(answer: Any) -> str:
    """What an error body says, in one line."""
    found = answer
    for key in ("error", "message"):
        if isinstance(found, dict):
            found = found.get(key, found.get("detail", found))
    return " ".join(str(found).split())[:500]
