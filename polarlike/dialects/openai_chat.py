"""OpenAI Chat Completions: request bodies to conversations, replies to chunks. Pure; knows nothing of tokens or I/O.

Fields that cannot be honoured are listed in `ModelRequest.dropped`; where a client would be misled by going on, the
request is refused with 400. Source: the public API reference; deviations of clients are named where they are handled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from polarlike.dialects.base import DialectError, ModelRequest, ReplyMeta, Usage
from polarlike.records import Message, Tool

_HONOURED = {"model", "messages", "tools", "stream", "stream_options", "tool_choice", "n", "response_format"}
_SAMPLING = {
    "temperature": (float, 0.0, 2.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, 0, 1_000_000),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.0, 100.0),
    "seed": (int, -(2**63), 2**63 - 1),
    "max_tokens": (int, 1, 10_000_000),
    "max_completion_tokens": (int, 1, 10_000_000),
}
MAX_DEPTH = 100  # how deeply a request may be nested; JSON writers give up at about 250 and Python at 1000
_REFUSED = {
    "logit_bias": "logit_bias would change the recorded distribution",
    "functions": "functions is the retired form of tools; send tools",
    "function_call": "function_call is the retired form of tool_choice; send tool_choice",
    "audio": "audio replies are not supported",
    "prediction": "predicted outputs are not supported",
}


def _bad(message: str, param: str | None = None, code: str | None = None) -> DialectError:
    if len(message) > 500:  # it may quote what the client sent
        message = message[:400] + " [...] " + message[-80:]
    return DialectError(400, message, kind="invalid_request_error", param=param, code=code)


class OpenAIChat:
    name = "openai-chat"
    path = "/chat/completions"

    # ------------------------------------------------------------ request

    def parse(self, body: bytes) -> ModelRequest:
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as e:
            raise _bad(f"The request body is not valid JSON: {e}.") from e
        if not isinstance(data, dict):
            raise _bad("The request body must be a JSON object.")
        if not _shallow(data):
            raise _bad(f"The request body is nested more than {MAX_DEPTH} levels deep.")
        for name, why in _REFUSED.items():
            if data.get(name) is not None:
                raise _bad(f"The field {name} cannot be honoured: {why}.", name)
        if data.get("n") not in (None, 1):
            raise _bad("Only n = 1 is served: send one request for each sample.", "n")
        options = data.get("stream_options") or {}
        if not isinstance(options, dict):
            raise _bad("stream_options must be an object.", "stream_options")
        request = ModelRequest(
            model=self._model(data),
            messages=self._messages(data.get("messages")),
            tools=_tools(data.get("tools")),
            sampling=_sampling(data),
            stream=_flag(data, "stream"),
            include_usage=_flag(options, "include_usage"),
        )
        self._constraints(data, request)
        known = _HONOURED | set(_SAMPLING) | {"stop"}
        request.dropped += sorted(k for k, v in data.items() if k not in known and v is not None)
        return request

    @staticmethod
    def _model(data: dict[str, Any]) -> str:
        model = data.get("model")
        if not isinstance(model, str) or not model:
            raise _bad("The request needs a model name.", "model")
        return model

    @staticmethod
    def _constraints(data: dict[str, Any], request: ModelRequest) -> None:
        choice = data.get("tool_choice")
        if choice == "none":
            request.tools = None
        elif choice not in (None, "auto"):
            raise _bad("tool_choice can be auto or none: forcing a call would change what is sampled.", "tool_choice")
        form = data.get("response_format")
        if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
            raise _bad("response_format can only be text: the policy is sampled without a grammar.", "response_format")

    def _messages(self, raw: Any) -> list[Message]:
        if not isinstance(raw, list) or not raw:
            raise _bad("messages must be a list with at least one message.", "messages")
        return [_message(m, f"messages.[{i}]") for i, m in enumerate(raw)]

    # ------------------------------------------------------------ reply

    def opening(self, meta: ReplyMeta) -> bytes:
        return _event(_chunk(meta, {"role": "assistant", "content": ""}))

    def delta(self, meta: ReplyMeta, *, reasoning: str = "", content: str = "") -> bytes:
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        return _event(_chunk(meta, delta))

    def closing(
        self,
        meta: ReplyMeta,
        reply: Message,
        finish_reason: str,
        usage: Usage | None,
        *,
        sent: tuple[str, str] = ("", ""),
    ) -> Iterator[bytes]:
        for chunk in self._rest(meta, reply, finish_reason, usage, sent):
            yield _event(chunk)
        yield b"data: [DONE]\n\n"

    def _rest(
        self, meta: ReplyMeta, reply: Message, finish_reason: str, usage: Usage | None, sent: tuple[str, str]
    ) -> Iterator[dict[str, Any]]:
        reasoning = reply.get("reasoning_content", "")[len(sent[0]) :]
        content = reply.get("content", "")[len(sent[1]) :]
        if reasoning:
            yield _chunk(meta, {"reasoning_content": reasoning})
        if content:
            yield _chunk(meta, {"content": content})
        for index, call in enumerate(reply.get("tool_calls", [])):
            yield _chunk(meta, {"tool_calls": [{"index": index, **call}]})
        yield _chunk(meta, {}, finish_reason)
        if meta.include_usage:
            yield {**_chunk(meta, {}), "choices": [], "usage": _usage(usage)}

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def plain(self, meta: ReplyMeta, reply: Message, finish_reason: str, usage: Usage | None) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        final = finish_reason
        for chunk in self._rest(meta, reply, finish_reason, usage, ("", "")):
            for choice in chunk["choices"]:
                _fold(message, choice["delta"])
                final = choice["finish_reason"] or final
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
        return orjson.dumps(
            {
                "id": meta.reply_id,
                "object": "chat.completion",
                "created": meta.created,
                "model": meta.model,
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": final}],
                "usage": _usage(usage),
            }
        )

    def error(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None
    ) -> bytes:
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})

    def error_event(self, message: str) -> bytes:
        return b"data: " + self.error(500, message) + b"\n\n"


def _shallow(value: Any) -> bool:
    """Whether no value lies deeper than MAX_DEPTH. Level by level: recursion is what this guards against."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [v for outer in level for v in (outer.values() if isinstance(outer, dict) else outer) if _nests(v)]
        if not level:
            return True
    return False


def _nests(value: Any) -> bool:
    return isinstance(value, dict | list)


def _flag(data: dict[str, Any], name: str) -> bool:
    value = data.get(name)
    if not isinstance(value, bool | None):
        raise _bad(f"{name} must be true or false.", name)
    return bool(value)


def _message(m: Any, where: str) -> Message:
    if not isinstance(m, dict):
        raise _bad(f"{where} must be an object.", where)
    role = m.get("role")
    if role == "developer":  # the newer name of the same thing
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise _bad(f"{where}.role is {role!r}; it must be system, developer, user, assistant or tool.", where)
    out: Message = {"role": role, "content": _text(m.get("content"), f"{where}.content")}
    if isinstance(m.get("name"), str):
        out["name"] = m["name"]
    if role == "tool":
        if not isinstance(m.get("tool_call_id"), str):
            raise _bad(f"{where} is a tool message and needs tool_call_id.", where)
        out["tool_call_id"] = m["tool_call_id"]
    if role == "assistant":
        # `reasoning` is what some servers and clients call the same field.
        reasoning = m.get("reasoning_content") or m.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            out["reasoning_content"] = reasoning
        if not isinstance(m.get("tool_calls"), list | None):
            raise _bad(f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
        if m.get("tool_calls"):
            out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls.[{i}]") for i, c in enumerate(m["tool_calls"])]
    elif m.get("content") is None:
        raise _bad(f"{where}.content is missing.", where)
    return out


def _text(content: Any, where: str) -> str:
    """Content as one string. Parts are joined here, before control tokens are guarded, so that two harmless parts can
    not make a control token together."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where} must be a string or a list of text parts.", where)
    pieces = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _bad(f"{where} holds a part of type {kind!r}; this policy reads text only.", where)
        piece = part.get("text", part.get("refusal"))
        if not isinstance(piece, str):
            raise _bad(f"{where} holds a text part without text.", where)
        pieces.append(piece)
    return "".join(pieces)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(f"{where} needs function.name.", where)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):  # some clients send the parsed object
        arguments = orjson.dumps(arguments).decode()
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out


def _tools(raw: Any) -> list[Tool] | None:
    if not raw:
        return None
    if not isinstance(raw, list):
        raise _bad("tools must be a list.", "tools")
    tools = []
    for i, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"tools.[{i}] must be a function with a name.", f"tools.[{i}]")
        tools.append({"type": "function", "function": function})
    return tools


def _sampling(data: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (kind, low, high) in _SAMPLING.items():
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise _bad(f"{name} must be a number.", name)
        if not low <= value <= high:
            raise _bad(f"{name} must lie between {low:g} and {high:g}.", name)
        out["max_tokens" if name == "max_completion_tokens" else name] = kind(value)
    stop = data.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise _bad("stop must be a string or a list of strings.", "stop")
        out["stop"] = tuple(stops)
    return out


def _chunk(meta: ReplyMeta, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": meta.reply_id,
        "object": "chat.completion.chunk",
        "created": meta.created,
        "model": meta.model,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }


def _fold(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for call in delta.get("tool_calls", []):
        message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})


def _usage(usage: Usage | None) -> dict[str, int] | None:
    if usage is None:  # a text-only engine has no tokens to count
        return None
    total = usage.prompt_tokens + usage.completion_tokens
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": total}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
