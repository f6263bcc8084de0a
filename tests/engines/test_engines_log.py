from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from polarlike.engines.base import EngineError, EngineOptions, GenerateRequest
from polarlike.engines.embedded import EmbeddedEngine
from polarlike.engines.log import EngineLog, LogEntry, read_log
from polarlike.records import Sampling, UsageError


def entry(name: str, n: int = 3, reason: str = "stop") -> LogEntry:
    return LogEntry(
        name,
        np.arange(4, dtype=np.int32),
        np.arange(n, dtype=np.int32),
        -np.arange(n, dtype=np.float32) / 3,
        np.full(n, 2, np.int32),
        reason,
        0.7,
    )


def test_an_entry_comes_back_bit_for_bit(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "deep" / "log.jsonl")
    log.write(entry("a", 50))
    got = read_log(tmp_path / "deep" / "log.jsonl")["a"]
    assert got.logprobs.tobytes() == entry("a", 50).logprobs.tobytes()
    assert got.prompt_ids.tolist() == [0, 1, 2, 3]
    assert got.versions.tolist() == [2] * 50
    assert (got.finish_reason, got.temperature) == ("stop", 0.7)
    assert (got.completion_ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)
    log.close()


def test_a_restart_appends_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EngineLog(path)
    log.write(entry("a"))
    log.write(entry("b"))
    log.close()
    path.write_bytes(path.read_bytes()[:-20])  # killed while b was being written
    assert list(read_log(path)) == ["a"]
    log = EngineLog(path)
    log.write(entry("c", 0, "abort"))
    log.close()
    assert list(read_log(path)) == ["a", "c"]
    assert read_log(path)["c"].completion_ids.size == 0


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "log.jsonl")
    threads = [
        threading.Thread(target=lambda k=k: [log.write(entry(f"{k}.{i}", 200)) for i in range(20)]) for k in range(5)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    log.close()
    assert len(read_log(tmp_path / "log.jsonl")) == 100


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    log = EngineLog(None)
    log.write(entry("a"))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_log(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot be written"):
        EngineLog(tmp_path)


def test_a_line_that_the_disk_takes_half_of_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EngineLog(path)
    log.write(entry("a"))
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        with pytest.raises(EngineError, match="free space and go on"):
            log.write(entry("b", 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size
    log.write(entry("c"))
    log.close()
    assert list(read_log(path)) == ["a", "c"]


async def test_a_full_disk_fails_requests_and_not_the_engine(tiny: Path) -> None:
    engine = EmbeddedEngine(tiny, EngineOptions(log=Path("/dev/full")))
    await engine.start()
    prompt = np.arange(5, dtype=np.int32)
    try:
        for k in range(2):
            request = GenerateRequest(f"r{k}", prompt, Sampling(max_tokens=4))
            with pytest.raises(EngineError, match="log"):
                async for _ in engine.generate(request):
                    pass
        stopped = engine.generate(GenerateRequest("r3", prompt, Sampling(max_tokens=500)))
        await anext(stopped)
        await stopped.aclose()
        assert (await engine.score(prompt, 2, 1.0)).size == 3
    finally:
        await engine.close()
