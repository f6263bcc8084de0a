"""What `polar doctor --engine` finds out about a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vllm_fake import FakeVllm

from polarlike.commands.doctor import checks
from sandbox.base import Check


async def found(fake: FakeVllm, tiny: Path) -> list[Check]:
    async with fake.serving() as url:
        said = await asyncio.to_thread(checks, tiny, f"vllm:{url}")
    return next(lines for heading, lines in said.items() if heading.startswith("engine"))


async def test_a_server_as_it_should_be(tiny: Path) -> None:
    lines = await found(FakeVllm(), tiny)
    assert [c.ok for c in lines] == [True, True, True]
    assert "a context of 2048 tokens" in lines[0].detail


async def test_a_server_without_its_flag_starts_and_the_flag_is_named(tiny: Path) -> None:
    lines = await found(FakeVllm(processed=False), tiny)
    assert [c.ok for c in lines] == [True, False, True]
    assert "--logprobs-mode processed_logprobs" in lines[1].detail


@pytest.mark.parametrize(
    ("spec", "message"), [("vllm:http://127.0.0.1:1", "There is no vLLM server"), ("vlm:x", "did you mean 'vllm'")]
)
def test_an_engine_that_is_not_there_is_one_line(tiny: Path, spec: str, message: str) -> None:
    [line] = checks(tiny, spec)[f"engine {spec}"]
    assert not line.ok
    assert message in line.detail
