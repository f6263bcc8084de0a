"""A program of two turns: it asks, asks for less, and leaves the last answer in a file. Standard library alone."""

import json
import os
import urllib.request
from pathlib import Path


def complete(messages: list[dict[str, str]]) -> dict[str, str]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        reply: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return reply


messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
messages += [complete(messages), {"role": "user", "content": "Say it shorter."}]
Path("said.txt").write_text(complete(messages).get("content") or "")
