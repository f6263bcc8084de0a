"""What several sandbox tests need: whether a process lives, a server on a box's socket, a program that hides."""

from __future__ import annotations

import asyncio
import socket
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

# Forks twice, starts its own session, cleans its environment, keeps the streams open, notes its id: as hard to find as
# a process can be without leaving its parent's box. Arguments: the file for its id, how long the parent stays.
DAEMON = textwrap.dedent(
    """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sh", ["sh", "-c", f"echo $$ > {sys.argv[1]}; exec sleep 300"], {})
        os._exit(0)
    time.sleep(float(sys.argv[2]))
    """
)


@pytest.fixture
def daemon() -> str:
    return DAEMON


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process runs; a zombie that waits for its parent does not."""

    def check(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return check


@pytest.fixture
def serve() -> Callable[[socket.socket, str], Awaitable[asyncio.Server]]:
    """Answers every HTTP request on a listening socket with one text."""

    async def start(listener: socket.socket, text: str) -> asyncio.Server:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.0 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
            writer.close()

        return await asyncio.start_server(answer, sock=listener)

    return start
