from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy_fakes import Say, SayingEngine

from polarlike.dialects.openai_chat import OpenAIChat
from polarlike.proxy.server import Proxy, listen
from polarlike.proxy.session import Session
from polarlike.proxy.settings import SessionSettings
from polarlike.store import Store


@dataclass
class Served:
    """A proxy on a loopback port, with one open session."""

    proxy: Proxy
    engine: SayingEngine
    store: Store
    session: Session
    base_url: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session.key}"}


@pytest.fixture
async def serve(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """serve(say, settings=..., **engine arguments) -> Served."""
    runners: list[web.AppRunner] = []
    opened: list[Served] = []

    async def start(say: Say, settings: SessionSettings | None = None, **engine: Any) -> Served:
        fake = SayingEngine(tiny_model, say, **engine)
        store = Store(f"sqlite:///{tmp_path / f'store{len(opened)}.db'}")
        proxy = Proxy(fake, store, [OpenAIChat()])
        session = await proxy.open_session(settings or SessionSettings())
        runner, port = await listen(proxy.app(), "127.0.0.1", 0)
        runners.append(runner)
        opened.append(Served(proxy, fake, store, session, f"http://127.0.0.1:{port}"))
        return opened[-1]

    yield start
    for served in opened:
        await served.proxy.close()
    for runner in runners:
        await runner.cleanup()
    for served in opened:
        await served.store.close()
