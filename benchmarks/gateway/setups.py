"""What the gateway benchmark compares: the upstream itself, polarlike's proxy, and the gateway of another project.

Each knows how its process is started over an upstream, how a client gets a session, and how to read from its files what
it kept. Records are read as each project keeps them; nothing here is measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp
import numpy as np

from benchmarks.gateway.agents import Target
from benchmarks.gateway.processes import Process
from polarlike.records import Ids, Logprobs
from polarlike.store import Store

PEER = "rllm-model-gateway"


@dataclass(slots=True)
class Kept:
    """One call as a gateway kept it, its prompt in full. reply_id: the id in the client's reply."""

    reply_id: str
    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs


class Setup(Protocol):
    name: str

    @property
    def process(self) -> Process | None:
        """The gateway; None where there is none."""
        ...

    @property
    def database(self) -> Path | None:
        """Where it keeps calls."""
        ...

    async def session(self) -> Target: ...

    async def close_sessions(self) -> None:
        """Says that no conversation goes on, where there is a way to say it and keep the record."""
        ...

    def recorded(self) -> int:
        """Calls that another process finds on disk."""
        ...

    def kept(self) -> list[Kept]:
        """In the order in which they were asked."""
        ...


class Bare:
    """No gateway: the upstream's own chat route."""

    name = "bare"
    process: Process | None = None
    database: Path | None = None

    def __init__(self, upstream: str):
        self._upstream = upstream

    async def session(self) -> Target:
        return f"{self._upstream}/v1/chat/completions", {}

    async def close_sessions(self) -> None:
        return None

    def recorded(self) -> int:
        return 0

    def kept(self) -> list[Kept]:
        return []


class Polar:
    """`polar serve` with its defaults."""

    name = "polarlike"

    def __init__(self, upstream: str, folder: Path, model: Path):
        command = [sys.executable, "-m", "polarlike", "serve", "--engine", f"vllm:{upstream}", "--model", str(model)]
        command += ["--out", str(folder / "run"), "--port", "0", "--admin-port", "0"]
        ready = r"Control API: (\S+) with key (\S+)\s.*stop with Ctrl-C"
        self.database = folder / "run" / "store.db"
        self.process = Process(command, folder / "polar.log", ready=ready)
        self._admin, self._key = self.process.said.groups()
        self._open: list[str] = []

    async def session(self) -> Target:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}) as http,
            http.post(self._admin) as response,
        ):
            made = await response.json()
        self._open.append(made["session_id"])
        return made["base_url"] + "/chat/completions", {"Authorization": f"Bearer {made['key']}"}

    async def close_sessions(self) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}) as http:
            while self._open:
                async with http.delete(f"{self._admin}/{self._open.pop()}"):
                    pass

    def recorded(self) -> int:
        return count(self.database, "calls")

    def kept(self) -> list[Kept]:
        store = Store(f"sqlite:///{self.database}")
        return [k for s in store.sessions() for k in self._session(store, s.session_id)]

    @staticmethod
    def _session(store: Store, session_id: str) -> list[Kept]:
        out, whole = [], {"": np.zeros(0, np.int32)}
        for call in store.calls(session_id):
            prompt = np.concatenate([whole[call.parent_id or ""], call.suffix_ids])
            whole[call.call_id] = np.concatenate([prompt, call.completion_ids])
            out.append(Kept(f"chatcmpl-{call.call_id}", prompt, call.completion_ids, call.logprobs))
        return out


class Peer:
    """rllm-model-gateway with its defaults: SQLite, traces written after the reply."""

    name = PEER

    def __init__(self, upstream: str, folder: Path, python: Path, port: int):
        self.database = folder / "traces.db"
        command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker", f"{upstream}/v1", "--db-path", str(self.database)]
        self.process = Process(command, folder / "peer.log", ready="Uvicorn running on")
        self._root = f"http://127.0.0.1:{port}"

    async def session(self) -> Target:
        async with aiohttp.ClientSession() as http, http.post(f"{self._root}/sessions", json={}) as response:
            made = await response.json()
        return f"{self._root}{made['url']}/chat/completions", {}

    async def close_sessions(self) -> None:
        return None  # its one way to end a session deletes the session's record

    def recorded(self) -> int:
        return count(self.database, "traces")

    def kept(self) -> list[Kept]:
        with closing(sqlite3.connect(self.database)) as connection:
            rows = connection.execute("select data from traces").fetchall()
        traces = sorted((json.loads(data) for (data,) in rows), key=lambda t: t["timestamp"])
        return [
            Kept(
                t["raw_response"]["id"],
                np.asarray(t["prompt_token_ids"], np.int32),
                np.asarray(t["completion_token_ids"], np.int32),
                np.asarray(t["logprobs"] or [], np.float32),
            )
            for t in traces
        ]


async def on_disk(setup: Setup, calls: int) -> None:
    """Waits until that many calls can be read from the setup's database, where it has one."""
    deadline = time.monotonic() + 120
    while setup.database is not None and setup.recorded() < calls:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{setup.name} has {setup.recorded()} of {calls} calls on disk after two minutes")
        await asyncio.sleep(0.01)


def count(database: Path, table: str) -> int:
    if not database.exists():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        try:
            return int(connection.execute(f"select count(*) from {table}").fetchone()[0])
        except sqlite3.OperationalError as e:
            if re.match("no such table", str(e)):
                return 0
            raise
