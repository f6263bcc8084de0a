from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlike.engines.tiny import build_tiny_model
from polarlike.templates import load_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a < b & 'c'",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List <files> & folders."},
    {"role": "assistant", "content": "", "tool_calls": [call('{"command": "ls"}'), call('{"command": "pwd"}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a\nb"},
    {"role": "tool", "tool_call_id": "call_2", "content": "/app"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "So.", "tool_calls": [call("{}")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:], CONVERSATION[:2], CONVERSATION[:5]])
def test_the_chat_template_renders_what_the_renderer_renders(
    tiny: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny))
    text = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    template = load_template(tiny, thinking=thinking)
    assert template.decode(template.render(messages, tools)) == text


def test_one_seed_builds_one_model(tmp_path: Path) -> None:
    a, b, c = (build_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]
    assert (a / "tokenizer.json").read_bytes() == (c / "tokenizer.json").read_bytes()


def test_every_id_of_the_model_is_a_token(tiny: Path) -> None:
    import json

    template = load_template(tiny)
    assert json.loads((tiny / "config.json").read_text())["vocab_size"] == template.vocab_size
