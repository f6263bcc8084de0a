import random
from pathlib import Path

import pytest

from examples.policy.prompts import MiniPrompts, Uname, load_prompts, reply
from polarlike.records import UsageError

HOST = Uname("Linux", "6.1", "#1 SMP", "x86_64")


def test_the_opening_is_the_two_templates_filled_in(prompts: MiniPrompts) -> None:
    system, user = prompts.opening("Mend it.", HOST)
    assert system == {"role": "system", "content": "You help at a computer."}
    wanted = "Do this: Mend it.\n\nUse the tool.\nSay what you do.\n\nHost: Linux 6.1 #1 SMP x86_64"
    assert user == {"role": "user", "content": wanted.replace("do.\n\nHost", "do.Host")}


def test_a_result_is_json_with_quotes_escaped_as_the_agent_escapes_them(prompts: MiniPrompts) -> None:
    message = prompts.observation("can't <x>\n", 2, "call_1")
    wanted = '{\n  "returncode": 2,\n  "output": "can\\u0027t \\u003cx\\u003e\\n"\n}'
    assert message == {"role": "tool", "tool_call_id": "call_1", "content": wanted}


def test_a_reply_carries_its_command_as_json(prompts: MiniPrompts) -> None:
    (call,) = reply('echo "a"', "Look.", "c")["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": '{"command": "echo \\"a\\""}'}


def test_thinning_keeps_the_task_and_drops_advice(prompts: MiniPrompts) -> None:
    bare = prompts.thinned(random.Random(0), 0.0)
    assert bare.opening("Mend it.", HOST)[1]["content"] == "Do this: Mend it."


def test_a_folder_that_is_not_the_package_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="install mini-swe-agent"):
        load_prompts(tmp_path)
