"""`kill -9` and a full disk, while clients talk: what a client was given is on disk, and nothing else is claimed."""

import concurrent.futures
import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_serving import Serving, serving

from polarlike.records import Delivery

# Replies take a few tens of milliseconds, so that a kill finds some in every state.
POLICY = """
import time

def policy(conversation):
    time.sleep(0.01)
    return "word " * 20
"""


def flags(tiny_model: Path, folder: Path) -> list[str]:
    (folder / "policy.py").write_text(POLICY)
    return ["--engine", f"scripted:{folder / 'policy.py'}", "--model", str(tiny_model)]


def talk(served: Serving, name: str, until: float) -> list[str]:
    """Ids of the replies this client received whole, one conversation after another, until the server is gone."""
    got: list[str] = []
    messages: list[Any] = [{"role": "user", "content": name}]
    with httpx.Client(headers={"Authorization": f"Bearer {served.key}"}, timeout=30) as http:
        while time.monotonic() < until:
            stream = len(got) % 2 == 1
            try:
                reply_id, content = ask(http, served.base_url, messages, stream)
            except httpx.HTTPError:
                break
            if reply_id is None:
                break
            got.append(reply_id)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    return got


def ask(http: httpx.Client, base_url: str, messages: list[Any], stream: bool) -> tuple[str | None, str]:
    """(id, text) of a reply that came whole; (None, "") of one that did not."""
    body = {"model": "m", "messages": messages, "stream": stream}
    if not stream:
        reply = http.post(f"{base_url}/chat/completions", json=body)
        reply.raise_for_status()
        data = reply.json()
        return data["id"].removeprefix("chatcmpl-"), data["choices"][0]["message"]["content"]
    found, content, whole = None, "", False
    with http.stream("POST", f"{base_url}/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                whole = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return None, ""
                found = chunk["id"].removeprefix("chatcmpl-")
                content += chunk["choices"][0]["delta"].get("content", "")
    return (found, content) if whole else (None, "")


def killed_runs(tiny_model: Path, folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """(replies received, calls on disk) over so many kills of one run folder."""
    rng = random.Random(seed)
    received: list[str] = []
    for k in range(kills):
        with serving(folder / "run", *flags(tiny_model, folder)) as served:
            with concurrent.futures.ThreadPoolExecutor(6) as threads:
                until = time.monotonic() + 30
                clients = [threads.submit(talk, served, f"client {k} {c}", until) for c in range(6)]
                time.sleep(0.2 + rng.random() * 1.2)
                served.kill()
                for client in clients:
                    received += client.result()
            on_disk = {c.call_id: c for c in served.calls()}
            assert set(received) <= set(on_disk), "a reply that a client has is not in the store"
            assert len(received) == len(set(received))
            states = {on_disk[i].delivery for i in received}
            assert states <= {Delivery.COMMITTED, Delivery.FLUSHED}
            found = served.evidence()
            assert found["first_mismatch"] is None
            assert found["trainable"] == found["equal"]
    return len(received), len(on_disk)


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_no_reply_that_was_delivered(tiny_model: Path, tmp_path: Path) -> None:
    received, on_disk = killed_runs(tiny_model, tmp_path, kills=5, seed=0)
    assert on_disk >= received > 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def post(served: Serving, content: str, *, stream: bool = False) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream}
    key = {"Authorization": f"Bearer {served.key}"}
    return httpx.post(f"{served.base_url}/chat/completions", json=body, headers=key, timeout=25)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "log"), [("scripted", False), ("scripted", True), ("embedded", True)])
def test_a_full_disk_is_a_clear_error_and_passes_with_the_space(
    tiny_model: Path, tmp_path: Path, small_disk: Path, engine: str, log: bool
) -> None:
    """Without an engine's log it is the store that meets the full disk."""
    chosen = flags(tiny_model, tmp_path) if engine == "scripted" else ["--engine", f"embedded:{tiny_model}"]
    with serving(small_disk / "run", *chosen, "--max-tokens", "20", log=log) as served:
        kept = [post(served, "before").json()["id"]]
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as f:
            while True:
                f.write(b"x" * 4096)
        refused = 0
        for k in range(12):
            # Text that does not compress, so that pages which are there already do not hold it.
            noise = random.Random(k).randbytes(1500).hex()
            plain, streamed = post(served, noise), post(served, noise, stream=True)
            for said, whole in ((plain.text, plain.status_code == 200), (streamed.text, "[DONE]" in streamed.text)):
                assert whole != ("free space and go on" in said), said
                refused += not whole
        assert (plain.status_code, plain.json()["error"]["type"]) == (500, "server_error")
        assert refused > 6
        filler.unlink()
        after = post(served, "after")
        assert after.status_code == 200, after.text
        kept.append(after.json()["id"])
        served.stop()
        on_disk = {"chatcmpl-" + c.call_id: c for c in served.calls()}
        assert set(kept) <= set(on_disk)
        assert len(on_disk) == 26 - refused
        if log:
            assert served.evidence()["first_mismatch"] is None
