"""What the policy's tokenizer is trained on.

A name is copied well only if it is split alike in the issue, in the file and in the command, and a held-out name no
differently from a training name. All names are two syllables: here each syllable is so frequent that it is merged
before any English word can take it apart, and no whole name occurs at all. So every name after a space is two tokens.
"""

from __future__ import annotations

import json
import random

from examples.make_tasks import CUES, FIRST, ISSUES, LAST, LAST_STEP, NOTE, SUBMIT
from examples.policy.dialogue import NO_CALL, THOUGHTS
from examples.policy.prompts import MiniPrompts, reply, sample_uname
from polarlike.engines.tiny import CHAT_TEMPLATE

VOCABULARY = 2_048  # an upper bound: the texts have fewer pairs to merge than that
_SYLLABLE_COPIES = 5_000
_PROMPT_COPIES = 50


def texts(prompts: MiniPrompts, seed: int = 0) -> list[str]:
    """The agent's prompts, the words of the tasks without their names, the commands, and the syllables."""
    rng = random.Random(seed)
    blank = {"function": "", "module": "", "cue": "", "word": "", "a": "", "b": ""}
    frequent = [
        prompts.system_template,
        prompts.instance_template,
        prompts.format_error(NO_CALL)["content"],
        prompts.observation("", 0, "x")["content"],
        json.dumps(prompts.tool),
        CHAT_TEMPLATE,
        *(issue.format(**blank) for issue in (*ISSUES, LAST_STEP)),
        *(cue.format(**blank) for cues in CUES.values() for cue in cues),
        "The settings in .cfg lack a value. Add the line = at the end of the file. # settings",
        "Rename the function to in .py and change nothing else.",
        "cat: .py: No such file or directory sed: can't read .cfg: /bin/sh: 1: : not found",
        "def (, ):\n    return + - * // % 1 2 3 4 5 6 7 8 9\n",
        *(reply(c, t, "x")["tool_calls"][0]["function"]["arguments"] for c, t in zip(_COMMANDS, THOUGHTS, strict=True)),
        *THOUGHTS,
    ]
    syllables = [*(f" {syllable}" for syllable in FIRST), *FIRST, *LAST]
    hosts = [str(sample_uname(rng)) for _ in range(200)]
    return frequent * _PROMPT_COPIES + syllables * _SYLLABLE_COPIES + hosts


_COMMANDS = ("cat .py", "sed -i 's| + | - |' .py", f"echo = >> .cfg > {NOTE}", SUBMIT)
