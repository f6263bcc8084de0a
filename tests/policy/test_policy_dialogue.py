import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.make_tasks import operator_task, split_names, teacher_commands
from examples.policy.dialogue import Teacher, command_of, draw_task, first_difference, teacher_example
from examples.policy.make_policy import TASKS, training_names
from examples.policy.prompts import MiniPrompts
from polarlike.templates import ChatTemplate

TASK = operator_task("dazu", "nebi", "boza", "lebu", wrong="//", right="%", phrasing=0, issue=0)
CALM = Teacher(slips=0.0)


def taught(example, template: ChatTemplate) -> str:
    return template.decode(example.ids[example.weight > 0])


def test_what_counts_is_the_teacher_s_four_replies_and_nothing_else(
    prompts: MiniPrompts, template: ChatTemplate
) -> None:
    example = teacher_example(random.Random(0), TASK, CALM, prompts, template)
    wanted = "".join(
        f'{thought}\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call><|im_end|>'
        for thought, command in zip(("Look.", "Edit.", "Note.", "Submit."), teacher_commands(TASK), strict=True)
    )
    assert taught(example, template) == wanted


def test_the_file_stands_in_the_dialogue_as_the_agent_shows_it(prompts: MiniPrompts, template: ChatTemplate) -> None:
    text = template.decode(teacher_example(random.Random(0), TASK, CALM, prompts, template).ids)
    assert '"output": "def nebi(boza, lebu):\\n    return boza // lebu\\n"' in text


def test_the_edit_s_two_operators_alone_weigh_more(prompts: MiniPrompts, template: ChatTemplate) -> None:
    teacher = Teacher(slips=0.0, operator_weight=6.0)
    example = teacher_example(random.Random(0), TASK, teacher, prompts, template)
    assert template.decode(example.ids[example.weight > 1]) == " // %"
    assert set(np.unique(example.weight)) == {0.0, 1.0, 6.0}


def test_a_slip_is_shown_and_not_taught(prompts: MiniPrompts, template: ChatTemplate) -> None:
    example = teacher_example(random.Random(0), TASK, Teacher(slips=1.0), prompts, template)
    assert template.decode(example.ids).count("No such file") == 2  # of cat and of sed
    assert taught(example, template).count("cat dazu.py") == 1
    assert taught(example, template).count("cat") == 1


def test_a_format_error_is_heard_and_its_reply_is_not_in_the_history(
    prompts: MiniPrompts, template: ChatTemplate
) -> None:
    example = teacher_example(random.Random(0), TASK, Teacher(slips=4.0), prompts, template)
    text = template.decode(example.ids)
    assert text.count("Bad call: No tool calls found") == 4
    assert text.count("<|im_start|>assistant") == 4 + 2  # the steps, and one slip of cat and one of sed


def test_a_wrong_teacher_never_writes_the_right_operator_nor_keeps_the_present_one(
    prompts: MiniPrompts, template: ChatTemplate
) -> None:
    rng = random.Random(0)
    examples = [teacher_example(rng, TASK, Teacher(right=0.0, slips=0.0), prompts, template) for _ in range(12)]
    edits = {text[text.index("| // |") + 7 :][:1] for text in (taught(e, template) for e in examples)}
    assert edits == {"+", "-", "*"}


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_no_name_of_an_example_task_is_trained_on(name: str) -> None:
    names = set(training_names())
    folders = list((TASKS / name).iterdir())
    assert folders and not names.intersection(folder.name.split("-")[1] for folder in folders)
    assert not names.intersection(split_names()[1])


def test_every_name_is_two_tokens_wherever_it_is_copied() -> None:
    tokenizer = Tokenizer.from_file(str(TASKS.parent / "policy" / "model" / "tokenizer.json"))
    for name in (name for part in split_names() for name in part):
        alone = tokenizer.encode(f" {name}").ids
        assert len(alone) == 2
        for text in (f"cat {name}.py", f"return {name} + x", f"s| {name}| b|"):
            ids = tokenizer.encode(text).ids
            assert any(ids[k : k + 2] == alone for k in range(len(ids))), text


def test_command_of_refuses_what_the_agent_refuses() -> None:
    function = {"name": "bash", "arguments": '{"cmd": "ls"}'}
    with pytest.raises(KeyError):
        command_of({"tool_calls": [{"function": function}]})
    with pytest.raises(KeyError):
        command_of({"content": "no call"})


def test_first_difference_is_the_index_where_streams_part() -> None:
    assert first_difference(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)) == 2


def test_all_kinds_of_task_are_drawn() -> None:
    rng, names = random.Random(0), training_names()
    assert {draw_task(rng, names).kind for _ in range(60)} == {"operator", "line", "rename"}
