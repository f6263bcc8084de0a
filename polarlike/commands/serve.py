"""polar serve: the proxy alone, for agents that are started by hand."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from contextlib import AsyncExitStack

from rich.console import Console

from polarlike.config import RunConfig
from polarlike.proxy.admin import admin_app
from polarlike.proxy.server import listen
from polarlike.proxy.settings import SessionSettings
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_proxy


async def run(config: RunConfig, host: str, port: int, admin_port: int, console: Console) -> None:
    """Serves until interrupted. One session is open from the start; more by the control API."""
    folder = RunFolder(config.out)
    folder.open(config, "serve")
    async with AsyncExitStack() as stack:
        stack.callback(folder.close)
        proxy = await stack.enter_async_context(open_proxy(config, folder))
        runner, port = await listen(proxy.app(), host, port)
        stack.push_async_callback(runner.cleanup)
        root = f"http://{host}:{port}"
        admin_key = "ak-" + secrets.token_urlsafe(24)
        admin, admin_port = await listen(
            admin_app(proxy, admin_key, lambda s: f"{root}/s/{s}/v1"), "127.0.0.1", admin_port
        )
        stack.push_async_callback(admin.cleanup)
        stack.push_async_callback(proxy.close)  # first: a client that waits is told before its socket closes
        settings = SessionSettings(
            sampling=config.sampling,
            streaming=config.session.streaming or "whole",
            on_edit=config.session.on_edit,
            grace_s=config.session.grace_s,
            rewrites=config.session.rewrites,
        )
        session = await proxy.open_session(settings)
        console.print(_exports(f"{root}/v1", session.key, proxy.engine.model_name), highlight=False, soft_wrap=True)
        console.print(f"Control API: http://127.0.0.1:{admin_port}/sessions with key {admin_key}", highlight=False)
        console.print(f"Recording to {config.out}; stop with Ctrl-C.", highlight=False)
        await _until_interrupted()


def _exports(base_url: str, key: str, model: str) -> str:
    return (
        f"Serving {model}. Point an agent at it:\n\n"
        f"# OpenAI SDKs and most agents\n"
        f"export OPENAI_BASE_URL={base_url} OPENAI_API_BASE={base_url} OPENAI_API_KEY={key} OPENAI_MODEL={model}\n\n"
        f"# mini-swe-agent\n"
        f"export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors\n"
        f"mini -y --exit-immediately -l 0 -m openai/{model} -c mini.yaml -c model.model_kwargs.api_base={base_url} "
        f"-t TASK\n"
    )


async def _until_interrupted() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
