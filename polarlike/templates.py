"""From a conversation to token ids and back, for one model family. Knows tokenizers and `renderers`.

What holds:
- `bridge` never touches what was sampled: the next prompt is prompt + completion + suffix, id for id.
- Text from outside (message contents, tool outputs, tool descriptions) never becomes a control token; see
  `polarlike.guard`.

Thinking: `thinking_retention="all"`, so the policy sees the thinking it sampled. This departs from chat templates that
drop earlier thinking.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from tokenizers import Tokenizer

from polarlike.guard import Guard, GuardedTokenizer
from polarlike.records import Ids, Message, PolarError, Tool, UsageError, new_id


class TemplateError(PolarError):
    """A conversation that this model's template cannot render."""


@dataclass(slots=True)
class Parsed:
    """A sampled reply as a message. malformed: tool calls that did not parse and are passed on as they were sampled."""

    message: Message
    malformed: int = 0


class ChatTemplate(Protocol):
    name: str
    vocab_size: int
    stop_ids: tuple[int, ...]

    def render(self, messages: list[Message], tools: list[Tool] | None) -> Ids:
        """The whole prompt, generation prompt included. int32 [P]. Raises TemplateError."""
        ...

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: list[Message], tools: list[Tool] | None
    ) -> Ids | None:
        """What to append to prompt + completion so that the model can answer `new_messages`; None if the template
        cannot continue this turn."""
        ...

    def parse(self, prompt_ids: Ids, completion_ids: Ids, tools: list[Tool] | None) -> Parsed: ...

    def encode_reply(self, prompt_ids: Ids, reply: Message) -> Ids:
        """The ids a model would have sampled to say `reply`, end of turn included (scripted policies)."""
        ...

    def least_tokens(self, messages: list[Message]) -> int:
        """A number of tokens that this conversation cannot be rendered in fewer than, known without encoding it."""
        ...

    def live_text(self, prompt_ids: Ids, completion_ids: Ids) -> tuple[str, str]:
        """(reasoning, content) so far of a reply still being sampled, as far as they can no longer change."""
        ...

    def decode(self, ids: Ids) -> str: ...


# ---------------------------------------------------------------- the renderers library

_TAIL = 64  # how many of a prompt's last tokens tell how the turn begins (is a <think> open?)
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')


class RendererTemplate:
    """A `ChatTemplate` over one renderer of the `renderers` library."""

    def __init__(self, tokenizer: Tokenizer, renderer: str, *, thinking: bool, model: str = ""):
        from renderers import create_renderer
        from renderers.configs import BaseRendererConfig

        configs = {
            c.model_fields["name"].default: c for c in _subclasses(BaseRendererConfig) if "name" in c.model_fields
        }
        if renderer not in configs or renderer in ("auto", "default", "custom"):
            known = ", ".join(
                sorted(n for n in configs if isinstance(n, str) and n not in ("auto", "default", "custom"))
            )
            raise UsageError(f"There is no renderer {renderer!r}; set --renderer to one of: {known}.")
        kind = configs[renderer]
        settings: dict[str, Any] = {"thinking_retention": "all"}
        if "enable_thinking" in kind.model_fields:
            settings["enable_thinking"] = thinking
        self._guard = Guard(tokenizer)
        guarded = GuardedTokenizer(self._guard, model, None)
        self._renderer: Any = create_renderer(guarded, kind(**settings))
        self.name = renderer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = tuple(int(i) for i in self._renderer.get_stop_token_ids())
        self._tokenizer = tokenizer
        self._turn_start = tokenizer.token_to_id("<|im_start|>")
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=1)

    def render(self, messages: list[Message], tools: list[Tool] | None) -> Ids:
        if not messages:
            raise TemplateError("The request has no messages; send at least one.")
        try:
            ids = self._renderer.render_ids(
                self._guarded(messages), tools=self._guard.tree(tools) if tools else None, add_generation_prompt=True
            )
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise TemplateError(f"The chat template {self.name} cannot render this conversation: {e}") from e
        return np.asarray(ids, np.int32)

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: list[Message], tools: list[Tool] | None
    ) -> Ids | None:
        # The bridge looks at the prompt's tail alone (is a <think> open?), so only the tail is handed over: the cost of
        # a turn is the turn's length, not the session's.
        tail = prompt_ids[-_TAIL:].tolist()
        completion = completion_ids.tolist()
        got = self._renderer.bridge_to_next_turn(
            tail, completion, self._guarded(new_messages), tools=self._guard.tree(tools) if tools else None
        )
        if got is None:
            return None
        sampled = len(tail) + len(completion)
        if got.token_ids[:sampled] != tail + completion:
            return None
        return np.asarray(got.token_ids[sampled:], np.int32)

    def parse(self, prompt_ids: Ids, completion_ids: Ids, tools: list[Tool] | None) -> Parsed:
        got = self._read(prompt_ids, completion_ids, tools)
        if got is None:  # the harness gets what was sampled as text
            ids = completion_ids[~np.isin(completion_ids, self.stop_ids)]
            return Parsed({"role": "assistant", "content": self.decode(ids).strip()}, 1)
        message: Message = {"role": "assistant", "content": got.content or ""}
        reasoning = (got.reasoning_content or "").strip()  # only thinking that was cut off comes with its outer space
        if reasoning:
            message["reasoning_content"] = reasoning
        calls, malformed = [], 0
        for call in got.tool_calls:
            found = _NAME.search(call.raw)
            name = call.name or (found and found.group(1))
            text = _raw_arguments(call.raw, call.arguments)
            malformed += str(call.status) != "ok" or not _is_object(text)
            if not _is_name(name):  # nothing to call: the text goes on as it was sampled
                message["content"] = (message["content"] + "\n" + call.raw).strip("\n")
                continue
            calls.append({"id": new_id("call"), "type": "function", "function": {"name": name, "arguments": text}})
        if calls:
            message["tool_calls"] = calls
        return Parsed(message, malformed)

    def encode_reply(self, prompt_ids: Ids, reply: Message) -> Ids:
        turn = {**reply, "role": "assistant", "content": reply.get("content") or ""}
        user: Message = {"role": "user", "content": "."}
        opened = self._renderer.render_ids([user], add_generation_prompt=True)
        whole = self._renderer.render_ids([user, *self._guarded([turn])])
        if whole[: len(opened)] != opened:  # a thinking template that opens <think> itself
            raise TemplateError(f"The template {self.name} cannot encode a scripted reply.")
        ids = whole[len(opened) :]
        ends = [k for k, i in enumerate(ids) if i in self.stop_ids]
        return np.asarray(ids[: ends[-1] + 1] if ends else ids, np.int32)

    def least_tokens(self, messages: list[Message]) -> int:
        # A byte-level token spells its bytes, one character each; normalization (NFC) can make one character of four.
        return sum(len(m.get("content", "")) for m in messages) // (4 * self._longest)

    def live_text(self, prompt_ids: Ids, completion_ids: Ids) -> tuple[str, str]:
        if completion_ids.size and completion_ids[0] == self._turn_start:
            return "", ""  # a sampled header of a turn, which is dropped once it is whole
        got = self._read(prompt_ids, completion_ids, None)
        # Calls are not shown before they parse, and a call that can not be read ends the showing.
        return ("", "") if got is None else (_settled(got.reasoning_content or ""), _settled(got.content or ""))

    def _read(self, prompt_ids: Ids, completion_ids: Ids, tools: list[Tool] | None) -> Any:
        """A `renderers` ParsedResponse. None where it fails on the attempt at a call: JSON nested past Python's limit,
        a number of 5,000 digits."""
        tail = prompt_ids[-_TAIL:].tolist()
        try:
            return self._renderer.parse_response(completion_ids.tolist(), tools=tools, prompt_ids=tail)
        except (ValueError, TypeError, RecursionError):
            return None

    def decode(self, ids: Ids) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _guarded(self, messages: list[Message]) -> list[Message]:
        out = []
        for message in messages:
            m = dict(message)
            for key in ("content", "reasoning_content", "name"):
                if isinstance(m.get(key), str):
                    m[key] = self._guard.text(m[key])
            if m.get("tool_calls"):
                m["tool_calls"] = [{**c, "function": self._guard.tree(c["function"])} for c in m["tool_calls"]]
            m.setdefault("content", "")
            out.append(m)
        return out


def _subclasses(cls: type[Any]) -> list[type[Any]]:
    return [s for c in cls.__subclasses__() for s in (c, *_subclasses(c))]


def _settled(text: str) -> str:
    """Text so far without what the next token can still change: outer space, which is stripped in the end, and the
    replacement characters of a character that is not whole."""
    before, text = "", text.strip()
    while text != before:
        before, text = text, text.rstrip("\ufffd").rstrip()
    return text


def _raw_arguments(raw: str, parsed: Any) -> str:
    """The arguments' text as it was sampled, spacing and escapes kept: everything after "arguments":, less the closing
    brace of the call around it. parsed: what they mean, where the call could be read."""
    found = re.search(r'"arguments"\s*:\s*', raw)
    if found:
        rest = raw[found.end() :]
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
            if parsed is None or value == parsed:
                return rest[:end]
        except (ValueError, RecursionError):
            trimmed = rest.rstrip()
            return trimmed.removesuffix("}").rstrip() if trimmed.count("}") > trimmed.count("{") else trimmed
    # Under an escaped key, or after an "arguments" that is another's.
    return "" if parsed is None else json.dumps(parsed)


def _is_object(text: str) -> bool:
    """Whether a client's strict parser reads it as a JSON object: no NaN, no lone surrogates."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _is_name(value: Any) -> bool:
    """JSON escapes can spell half a surrogate pair, which no answer can carry."""
    return isinstance(value, str) and value != "" and not re.search("[\ud800-\udfff]", value)


# ---------------------------------------------------------------- loading

_RENDERER_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "llama": "llama-3",
    "gpt_oss": "gpt-oss",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
}


def _table(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text())
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise UsageError(f"{file} is no JSON table; copy the model folder again.")
    return table


def load_template(model_dir: Path, *, renderer: str | None = None, thinking: bool = False) -> ChatTemplate:
    """The template of a Hugging Face model folder. Raises UsageError with what is missing."""
    tokenizer_file = model_dir / "tokenizer.json"
    if not model_dir.is_dir():
        raise UsageError(f"There is no model folder at {model_dir}; give a Hugging Face model folder.")
    if not tokenizer_file.is_file():
        raise UsageError(f"The model folder {model_dir} has no tokenizer.json; save its fast tokenizer there.")
    if renderer is None:
        has_template = (model_dir / "chat_template.jinja").is_file()
        settings = model_dir / "tokenizer_config.json"
        if settings.is_file():
            has_template = has_template or bool(_table(settings).get("chat_template"))
        config = model_dir / "config.json"
        kind = _table(config).get("model_type", "") if config.is_file() else ""
        renderer = _RENDERER_OF_MODEL_TYPE.get(kind)
        if not has_template:
            raise UsageError(
                f"The model in {model_dir} has no chat template; add chat_template.jinja or name its family "
                "with --renderer (for example --renderer qwen3)."
            )
        if renderer is None:
            raise UsageError(
                f"No renderer is known for model type {kind!r} in {model_dir}; name its family with --renderer."
            )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as e:  # the library raises nothing narrower
        raise UsageError(f"{tokenizer_file} is no tokenizer ({e}); copy the model folder again.") from e
    return RendererTemplate(tokenizer, renderer, thinking=thinking, model=model_dir.name)
