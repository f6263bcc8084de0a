from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines_helpers import other_weights, plain_logprobs, plain_model, published

from polarlike.engines.base import Chunk, Conversation, EngineError, EngineOptions, GenerateRequest
from polarlike.engines.log import read_log
from polarlike.engines.scripted import ScriptedEngine, create
from polarlike.records import Sampling, UsageError, no_ids

MESSAGES = [{"role": "user", "content": "Which operator?"}]


def script(folder: Path, text: str) -> str:
    file = folder / "teacher.py"
    file.write_text(text)
    return str(file)


def request(engine: ScriptedEngine, name: str = "r", task: dict[str, Any] | None = None, **s: Any) -> GenerateRequest:
    prompt = engine.template.render(MESSAGES, None) if engine.template else no_ids()
    return GenerateRequest(name, prompt, Sampling(**s), conversation=Conversation(MESSAGES, task=task))


async def chunks_of(engine: ScriptedEngine, asked: GenerateRequest) -> list[Chunk]:
    return [c async for c in engine.generate(asked)]


async def test_without_a_model_the_reply_comes_as_text(tmp_path: Path) -> None:
    file = script(tmp_path, "def policy(c):\n    return c.messages[0]['content'] + ' ' + c.task['task_id']\n")
    engine = create(file, EngineOptions(log=tmp_path / "log.jsonl"))
    await engine.start()
    assert engine.text_only
    (chunk,) = await chunks_of(engine, request(engine, task={"task_id": "t1"}))
    assert chunk.reply == {"role": "assistant", "content": "Which operator? t1"}
    assert (chunk.finish_reason, chunk.ids.size) == ("stop", 0)
    with pytest.raises(EngineError, match="cannot score"):
        await engine.score(np.array([1, 2], np.int32), 1, 1.0)
    await engine.close()
    assert read_log(tmp_path / "log.jsonl")["r"].finish_reason == "stop"


async def test_an_async_policy_may_call_tools_with_a_dict_of_arguments(tmp_path: Path) -> None:
    text = """
async def policy(conversation):
    return {"content": None, "tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}]}
"""
    engine = create(script(tmp_path, text), EngineOptions())
    (chunk,) = await chunks_of(engine, request(engine))
    assert chunk.reply is not None
    assert chunk.reply["content"] == ""
    (call,) = chunk.reply["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
    assert call["id"].startswith("call_")


async def test_with_a_model_the_tokens_and_logprobs_are_that_models(tiny: Path, tmp_path: Path) -> None:
    engine = create(script(tmp_path, "def policy(c):\n    return 'The answer is 42.'\n"), EngineOptions(model=tiny))
    await engine.start()
    assert not engine.text_only
    model, asked = plain_model(tiny), request(engine, temperature=0.6)
    (chunk,) = await chunks_of(engine, asked)
    assert engine.template is not None
    assert engine.template.parse(asked.prompt_ids, chunk.ids, None).message["content"] == "The answer is 42."
    assert chunk.ids[-1] in engine.template.stop_ids
    assert chunk.finish_reason == "stop"
    expected = plain_logprobs(model, asked.prompt_ids, chunk.ids, 0.6)
    np.testing.assert_allclose(chunk.logprobs, expected, atol=1e-4, rtol=0)
    assert chunk.versions.tolist() == [0] * chunk.ids.size

    weights = other_weights(model)
    await engine.publish(published(weights), 4)
    (chunk,) = await chunks_of(engine, asked)
    expected = plain_logprobs(plain_model(tiny, weights), asked.prompt_ids, chunk.ids, 0.6)
    np.testing.assert_allclose(chunk.logprobs, expected, atol=1e-4, rtol=0)
    assert chunk.versions.tolist() == [4] * chunk.ids.size
    await engine.close()


async def test_a_reply_over_the_limit_is_cut(tiny: Path, tmp_path: Path) -> None:
    engine = create(script(tmp_path, "def policy(c):\n    return 'word ' * 50\n"), EngineOptions(model=tiny))
    await engine.start()
    (chunk,) = await chunks_of(engine, request(engine, max_tokens=5))
    assert (chunk.ids.size, chunk.logprobs.size, chunk.finish_reason) == (5, 5, "length")
    await engine.close()


async def test_a_streamed_reply_is_the_same_reply_in_pieces_over_its_delay(tiny: Path, tmp_path: Path) -> None:
    file = script(tmp_path, "def policy(c):\n    return 'The answer is 42.'\n")
    whole, streamed = (
        create(file, EngineOptions(model=tiny)),
        create(file, EngineOptions(model=tiny, extra={"stream": 2, "delay_s": 0.2}, log=tmp_path / "log.jsonl")),
    )
    await whole.start()
    await streamed.start()
    (expected,) = await chunks_of(whole, request(whole))
    started = time.monotonic()
    pieces = await chunks_of(streamed, request(streamed))
    assert time.monotonic() - started >= 0.2
    assert [c.ids.size for c in pieces[:-1]] == [2] * (len(pieces) - 1)
    assert [c.finish_reason for c in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert np.concatenate([c.ids for c in pieces]).tolist() == expected.ids.tolist()
    np.testing.assert_array_equal(np.concatenate([c.logprobs for c in pieces]), expected.logprobs)
    cut = streamed.generate(request(streamed, "cut"))
    first = await anext(cut)
    await cut.aclose()
    await whole.close()
    await streamed.close()
    log = read_log(tmp_path / "log.jsonl")
    assert log["r"].completion_ids.tolist() == expected.ids.tolist()
    assert log["cut"].finish_reason == "abort"
    assert log["cut"].completion_ids.tolist() == first.ids.tolist()


async def test_a_policy_may_take_its_time_without_blocking_others(tmp_path: Path) -> None:
    text = "import time\ndef policy(c):\n    time.sleep(0.2)\n    return 'x'\n"
    engine = create(script(tmp_path, text), EngineOptions())
    started = time.monotonic()
    await asyncio.gather(*[chunks_of(engine, request(engine, str(k))) for k in range(4)])
    assert time.monotonic() - started < 0.7


async def test_a_policy_cannot_change_the_conversation_it_was_given(tmp_path: Path) -> None:
    text = "def policy(c):\n    c.messages[0]['content'] = 'x'\n    c.messages.clear()\n    return ''\n"
    engine = create(script(tmp_path, text), EngineOptions())
    await chunks_of(engine, request(engine))
    assert MESSAGES == [{"role": "user", "content": "Which operator?"}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return {}['key']\n", r"KeyError: 'key' \(file teacher.py, line 2\)"),
        ("    return 5\n", "returned a int; return a message or a string"),
        ("    return {'tool_calls': [{'function': {}}]}\n", "returned a tool call that is not"),
    ],
)
async def test_a_fault_in_the_policy_names_its_file_and_line(tmp_path: Path, body: str, message: str) -> None:
    engine = create(script(tmp_path, "def policy(c):\n" + body), EngineOptions())
    with pytest.raises(EngineError, match=message):
        await chunks_of(engine, request(engine))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def policy(c:\n", r"SyntaxError.*file teacher.py, line 1"),
        ("x = 1\nimport nothing_of_that_name\n", r"ModuleNotFoundError.*file teacher.py, line 2"),
        ("def other(c): ...\n", r"defines no function policy\(conversation\)"),
    ],
)
def test_a_file_that_cannot_serve_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create(script(tmp_path, text), EngineOptions())


def test_a_missing_file_and_an_unknown_setting_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no scripted policy"):
        create(str(tmp_path / "none.py"), EngineOptions())
    with pytest.raises(UsageError, match="no setting 'dealy_s'"):
        create(script(tmp_path, "def policy(c): ...\n"), EngineOptions(extra={"dealy_s": 1}))


def test_a_policy_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_teacher.py").write_text("ANSWER = 'yes'\n")
    text = "from neighbour_of_teacher import ANSWER\ndef policy(c):\n    return ANSWER\n"
    assert create(script(tmp_path, text), EngineOptions())._policy(Conversation([])) == "yes"
