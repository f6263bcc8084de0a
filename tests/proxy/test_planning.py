"""Which call a request continues. The template is the tiny model's; replies are encoded by hand."""

from pathlib import Path

import numpy as np
import pytest
from proxy_fakes import BASH, call

from polarlike.proxy.identity import echo_edits
from polarlike.proxy.planning import Plan, Planner, Turn
from polarlike.records import Cause, Message
from polarlike.templates import ChatTemplate, load_template

SYSTEM: Message = {"role": "system", "content": "S"}
USER: Message = {"role": "user", "content": "U"}


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return load_template(tiny_model)


class Talk:
    """Plans and answers as a session would."""

    def __init__(self, template: ChatTemplate, **options: bool):
        self.template, self.planner, self.count = template, Planner(template, **options), 0

    def ask(self, messages: list[Message], tools: list | None = None) -> Plan:
        plan = self.planner.plan(messages, tools)
        self.planner.opened(plan)
        return plan

    def answer(self, plan: Plan, reply: Message | str) -> Turn:
        message: Message = {"role": "assistant", "content": reply} if isinstance(reply, str) else dict(reply)
        self.count += 1
        for k, c in enumerate(message.get("tool_calls", [])):
            c["id"] = f"call{self.count}.{k}"
        ids = self.template.encode_reply(plan.prompt_ids, message)
        turn = Turn(f"turn{self.count}", plan.parent, plan.suffix_ids, ids, message)
        self.planner.finished(plan, turn)
        return turn


def tool(turn: Turn, text: str) -> Message:
    return {"role": "tool", "tool_call_id": turn.reply["tool_calls"][0]["id"], "content": text}


def test_twenty_turns_extend_one_prompt(template: ChatTemplate) -> None:
    talk, messages = Talk(template), [SYSTEM, USER]
    seen = np.zeros(0, np.int32)
    for k in range(20):
        plan = talk.ask(messages, [BASH])
        assert plan.cause is (Cause.FIRST if k == 0 else Cause.CONTINUES)
        assert np.array_equal(plan.prompt_ids[: seen.size], seen)
        turn = talk.answer(plan, call(f"ls {k}"))
        seen = np.concatenate([plan.prompt_ids, turn.completion_ids])
        messages = [*messages, turn.reply, tool(turn, f"out {k}")]


def test_a_reply_the_harness_dropped_is_left_beside_the_lane(template: ChatTemplate) -> None:
    talk = Talk(template)
    first = talk.answer(talk.ask([SYSTEM, USER], [BASH]), call("ls"))
    history = [SYSTEM, USER, first.reply, tool(first, "a")]
    dropped = talk.answer(talk.ask(history, [BASH]), "no call here")
    again = talk.ask([*history, {"role": "user", "content": "call a tool"}], [BASH])
    assert again.cause is Cause.CONTINUES
    assert again.parent is first
    assert dropped.parent is first
    assert [m["role"] for m in again.new_messages] == ["tool", "user"]


def test_a_first_reply_that_was_dropped_starts_a_new_segment_with_that_cause(template: ChatTemplate) -> None:
    talk = Talk(template)
    talk.answer(talk.ask([SYSTEM, USER]), "oops")
    again = talk.ask([SYSTEM, USER, {"role": "user", "content": "format error"}])
    assert (again.cause, again.parent) == (Cause.REPLY_DROPPED, None)
    assert again.first_difference is not None
    assert again.first_difference["call_id"] == "turn1"


def test_changed_tools_changed_history_and_other_conversations_have_their_causes(template: ChatTemplate) -> None:
    talk = Talk(template)
    turn = talk.answer(talk.ask([SYSTEM, USER], [BASH]), "hello")
    more: Message = {"role": "user", "content": "more"}
    assert talk.ask([SYSTEM, USER, turn.reply, more], None).cause is Cause.TOOLS_CHANGED
    edited: Message = {"role": "user", "content": "U, edited"}
    assert talk.ask([SYSTEM, edited, turn.reply, more], [BASH]).cause is Cause.HISTORY_CHANGED
    title: Message = {"role": "user", "content": "make a title"}
    assert talk.ask([title], [BASH]).cause is Cause.NEW_CONVERSATION


def test_a_side_call_between_two_turns_leaves_the_lane_whole(template: ChatTemplate) -> None:
    talk = Talk(template)
    turn = talk.answer(talk.ask([SYSTEM, USER]), "hello")
    talk.answer(talk.ask([{"role": "user", "content": "make a title"}]), "a title")
    plan = talk.ask([SYSTEM, USER, turn.reply, {"role": "user", "content": "more"}])
    assert (plan.cause, plan.parent) == (Cause.CONTINUES, turn)


def test_siblings_of_equal_text_are_told_apart_by_reasoning_or_not_at_all(tiny_model: Path) -> None:
    talk = Talk(load_template(tiny_model, thinking=True))
    plans = [talk.ask([USER]), talk.ask([USER])]
    assert [p.cause for p in plans] == [Cause.FIRST, Cause.PARALLEL]
    one = talk.answer(plans[0], {"role": "assistant", "content": "ok", "reasoning_content": "because"})
    talk.answer(plans[1], {"role": "assistant", "content": "ok", "reasoning_content": "for another reason"})
    more: Message = {"role": "user", "content": "more"}
    named = talk.ask([USER, {"role": "assistant", "content": "ok", "reasoning_content": "because "}, more])
    assert (named.cause, named.parent) == (Cause.CONTINUES, one)
    unnamed = talk.ask([USER, {"role": "assistant", "content": "ok"}, more])
    assert (unnamed.cause, unnamed.parent) == (Cause.AMBIGUOUS, None)


def test_identical_siblings_are_no_ambiguity(template: ChatTemplate) -> None:
    talk = Talk(template)
    plans = [talk.ask([USER]), talk.ask([USER])]
    turns = [talk.answer(p, "ok") for p in plans]
    plan = talk.ask([USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}])
    assert (plan.cause, plan.parent) == (Cause.CONTINUES, turns[1])


def test_a_request_that_ends_with_the_assistants_turn_is_rendered_anew(template: ChatTemplate) -> None:
    talk = Talk(template)
    turn = talk.answer(talk.ask([USER]), "hello")
    plan = talk.ask([USER, turn.reply])
    assert (plan.cause, plan.parent) == (Cause.BRIDGE_REFUSED, None)


def test_turns_the_prompt_supplies_are_prompt_and_not_replies(template: ChatTemplate) -> None:
    talk = Talk(template)
    plan = talk.ask([USER, {"role": "assistant", "content": "an example"}, USER])
    assert (plan.cause, plan.parent) == (Cause.FIRST, None)


SAMPLED = {
    "role": "assistant",
    "content": "text ",
    "reasoning_content": "why ",
    **{"tool_calls": call("ls")["tool_calls"]},
}


@pytest.mark.parametrize(
    ("change", "edits"),
    [
        ({}, []),
        ({"content": " text"}, []),
        ({"reasoning_content": "why"}, []),
        ({"reasoning_content": None}, []),
        ({"content": "other"}, ["content"]),
        ({"reasoning_content": "else"}, ["reasoning"]),
        ({"arguments": '{"command":"ls"}'}, []),
        ({"arguments": '{"command": "\\u006cs"}'}, []),
        ({"arguments": '{"command": "rm"}'}, ["tool_calls[0].arguments"]),
        ({"name": "invalid"}, ["tool_calls[0].name"]),
        ({"tool_calls": []}, ["tool_calls"]),
    ],
)
def test_only_a_difference_in_meaning_is_an_edit(change: dict, edits: list[str]) -> None:
    echoed = {
        **SAMPLED,
        "tool_calls": [{**SAMPLED["tool_calls"][0], "function": dict(SAMPLED["tool_calls"][0]["function"])}],
    }
    for key, value in change.items():
        if key in ("arguments", "name"):
            echoed["tool_calls"][0]["function"][key] = value
        elif value is None:
            del echoed[key]
        else:
            echoed[key] = value
    assert echo_edits(SAMPLED, echoed) == edits
