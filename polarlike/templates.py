"""From a conversation to token ids and back, for one model family. Knows tokenizers and `renderers`.

What holds:
- `bridge` never touches what was sampled: the next prompt is prompt + completion + suffix, id for id.
- Text from outside (message contents, tool outputs, tool descriptions) never becomes a control token. `renderers`
  encodes text with the tokenizer as it is, which turns "<|im_end|>" written in a file into the real token; so control
  strings in content are swapped for private-use markers before rendering, and `_GuardedTokenizer` encodes a marker
  as the plain text it stands for.

Thinking: `thinking_retention="all"`, so the policy sees the thinking it sampled. This departs from chat templates that
drop earlier thinking.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

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

    def live_text(self, prompt_ids: Ids, completion_ids: Ids) -> tuple[str, str]:
        """(reasoning, content) so far of a reply still being sampled, as far as they can no longer change."""
        ...

    def decode(self, ids: Ids) -> str: ...


# ---------------------------------------------------------------- content is data

_OPEN, _CLOSE, _BASE = "\ue000", "\ue001", 0xE100


@dataclass
class _Guard:
    """Swaps control strings in content for markers, and encodes markers as plain text."""

    tokenizer: Tokenizer
    controls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        added = {t.content for t in self.tokenizer.get_added_tokens_decoder().values()}
        # Longest first, so that a control string inside another is not taken for it. The markers' own characters are
        # guarded too: text that contains them cannot pose as a marker.
        self.controls = [*sorted(added, key=len, reverse=True), _OPEN, _CLOSE]
        self._pattern = re.compile("|".join(re.escape(c) for c in self.controls))
        self._marker = re.compile(f"{_OPEN}(.){_CLOSE}", re.DOTALL)
        index = {c: i for i, c in enumerate(self.controls)}
        self._swap = {c: f"{_OPEN}{chr(_BASE + i)}{_CLOSE}" for c, i in index.items()}
        self._plain = [self._encode_plain(c) for c in self.controls]

    def _encode_plain(self, text: str) -> list[int]:
        """A control string in ordinary tokens: cut so that no piece is the string itself."""
        added = set(self.tokenizer.get_added_tokens_decoder())
        for pieces in ([text[:1], text[1:]], list(text)):
            ids = [i for piece in pieces if piece for i in self.tokenizer.encode(piece, add_special_tokens=False).ids]
            if not added.intersection(ids):
                return ids
        return [i for i in ids if i not in added]  # a one-character control token has no plain spelling

    def text(self, text: str) -> str:
        return self._pattern.sub(lambda m: self._swap[m.group()], text)

    def tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.tree(v) for v in value]
        if isinstance(value, dict):
            return {self.text(k): self.tree(v) for k, v in value.items()}
        return value

    def restore(self, text: str) -> str:
        """Markers back to the text they stand for."""
        return self._marker.sub(lambda m: self.controls[ord(m.group(1)) - _BASE], text)

    def encode(self, text: str) -> list[int]:
        if _OPEN not in text:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for k, piece in enumerate(self._marker.split(text)):
            if k % 2:
                ids += self._plain[ord(piece) - _BASE]
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        return ids


class _GuardedTokenizer:
    """The few methods that `renderers` asks of a tokenizer. It offers no character offsets, so that `renderers` encodes
    through `encode` alone."""

    unk_token_id: int | None = None

    def __init__(self, guard: _Guard, name: str, eos: int | None):
        self._guard = guard
        self.name_or_path = name
        self.eos_token_id = eos

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._guard.encode(text)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        return self._guard.tokenizer.decode(ids, skip_special_tokens=bool(kwargs.get("skip_special_tokens", False)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._guard.tokenizer.token_to_id(tokens)
        return [self._guard.tokenizer.token_to_id(t) for t in tokens]


# ---------------------------------------------------------------- the renderers library

_ARGUMENTS = re.compile(r'"arguments"\s*:\s*(.*?)\s*\}?\s*$', re.DOTALL)
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
        self._guard = _Guard(tokenizer)
        guarded = _GuardedTokenizer(self._guard, model, None)
        self._renderer: Any = create_renderer(guarded, kind(**settings))
        self.name = renderer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = tuple(int(i) for i in self._renderer.get_stop_token_ids())
        self._control_ids = frozenset(tokenizer.get_added_tokens_decoder())
        self._tokenizer = tokenizer

    def render(self, messages: list[Message], tools: list[Tool] | None) -> Ids:
        if not messages:
            raise TemplateError("The request has no messages; send at least one.")
        try:
            ids = self._renderer.render_ids(
                self._guarded(messages), tools=self._guard.tree(tools) if tools else None, add_generation_prompt=True
            )
        except (ValueError, KeyError, TypeError) as e:
            raise TemplateError(f"The chat template {self.name} cannot render this conversation: {e}") from e
        return np.asarray(ids, np.int32)

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: list[Message], tools: list[Tool] | None
    ) -> Ids | None:
        # The bridge looks at the prompt's tail alone (is a <think> open?), so only the tail is handed over: the cost of
        # a turn is the turn's length, not the session's.
        tail = prompt_ids[-64:].tolist()
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
        got = self._renderer.parse_response(completion_ids.tolist(), tools=tools, prompt_ids=prompt_ids[-64:].tolist())
        message: Message = {"role": "assistant", "content": got.content or ""}
        if got.reasoning_content:
            message["reasoning_content"] = got.reasoning_content
        calls, malformed = [], 0
        for call in got.tool_calls:
            name, arguments = call.name, call.arguments
            if str(call.status) == "ok" and isinstance(arguments, dict):
                text = _raw_arguments(call.raw) or json.dumps(arguments, ensure_ascii=False)
            else:
                malformed += 1
                found = _NAME.search(call.raw)
                name = name or (found and found.group(1))
                text = _raw_arguments(call.raw) or (json.dumps(arguments) if arguments is not None else "")
            if not name:  # nothing to call: pass the text on, as it was sampled
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

    def live_text(self, prompt_ids: Ids, completion_ids: Ids) -> tuple[str, str]:
        ids = completion_ids.tolist()
        # From the first control token that opens a call on, nothing is shown before it parses.
        got = self._renderer.parse_response(ids, prompt_ids=prompt_ids[-64:].tolist())
        reasoning, content = got.reasoning_content or "", got.content or ""
        settled = reasoning if got.reasoning_complete else reasoning.rstrip().removesuffix("\ufffd")
        return settled, content.rstrip().rstrip("\ufffd")

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


def _raw_arguments(raw: str) -> str:
    """The arguments' text as it was sampled, spacing and escapes kept: everything after "arguments":, less the closing
    brace of the call around it."""
    found = re.search(r'"arguments"\s*:\s*', raw)
    if not found:
        return ""
    rest = raw[found.end() :]
    try:
        _, end = json.JSONDecoder().raw_decode(rest)
        return rest[:end]
    except ValueError:
        trimmed = rest.rstrip()
        return trimmed.removesuffix("}").rstrip() if trimmed.count("}") > trimmed.count("{") else trimmed


# ---------------------------------------------------------------- loading

_RENDERER_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "llama": "llama-3",
    "gpt_oss": "gpt-oss",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
}


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
            has_template = has_template or bool(json.loads(settings.read_text()).get("chat_template"))
        config = model_dir / "config.json"
        kind = json.loads(config.read_text()).get("model_type", "") if config.is_file() else ""
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
    return RendererTemplate(Tokenizer.from_file(str(tokenizer_file)), renderer, thinking=thinking, model=model_dir.name)
