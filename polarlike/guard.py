"""Content is data: text from outside never becomes a control token. Knows tokenizers; no messages and no templates.

`renderers` encodes text with the tokenizer as it is, which turns "<|im_end|>" written in a file into the real token. So
control strings in content are swapped for private-use markers before rendering (`Guard.text`, `Guard.tree`), and
`GuardedTokenizer` encodes a marker as the plain text it stands for.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

# One text is encoded at a time: a pool of threads gains nothing, and it makes every later fork print a warning.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_OPEN, _CLOSE, _BASE = "\ue000", "\ue001", 0xE100


@dataclass
class Guard:
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
        ids: list[int] = []
        for k, piece in enumerate(self._marker.split(text) if _OPEN in text else [text]):
            if k % 2:
                ids += self._plain[ord(piece) - _BASE]
            elif piece:
                # As a batch of one: `encode` would hold the interpreter's lock, and with it every other session, for
                # as long as a long text takes (a second a megabyte).
                ids += self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        return ids


class GuardedTokenizer:
    """The few methods that `renderers` asks of a tokenizer. It offers no character offsets, so that `renderers` encodes
    through `encode` alone."""

    unk_token_id: int | None = None

    def __init__(self, guard: Guard, name: str, eos: int | None):
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
