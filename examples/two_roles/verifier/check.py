"""Judges a game by answer.txt and talk.json and writes reward.json: 1 for the right answer, 0.25 for the answer
"none", 0 for a wrong one or no file. Components: the share of the solver's answers and of the checker's verdicts that
were right; a role that did not speak has none.

Plain Python, nothing to install. The right number is the variable RIGHT.
"""

import json
import os
import re
from pathlib import Path

WORK = Path(os.environ.get("POLAR_WORKDIR", "/app"))
LOGS = Path(os.environ.get("POLAR_LOGS", "/logs"))
NO_ANSWER = 0.25


def read(name):
    """A file of the work folder as text; None for what is missing, a link, or not text."""
    path = WORK / name
    try:
        return None if path.is_symlink() else path.read_text()
    except (OSError, ValueError):
        return None


def reward(answer, right):
    if answer == "none":
        return NO_ANSWER
    found = re.fullmatch(r"\d{1,9}", (answer or "").strip())
    return float(found is not None and int(found[0]) == right)


def verdict_on(number, right):
    """What the checker should say of an answer."""
    return "fine" if number == right else "high" if number > right else "low"


def components(talk, right):
    """By role; empty where the talk cannot be read."""
    hits = {"solver": [], "checker": []}
    number = None
    try:
        for turn in json.loads(talk or "[]"):
            if turn["role"] == "solver":
                number = turn["number"]
                hits["solver"].append(number == right)
            else:
                hits["checker"].append(turn["verdict"] == verdict_on(number, right))
    except (ValueError, KeyError, TypeError):
        return {}
    return {role: sum(found) / len(found) for role, found in hits.items() if found}


def main():
    right = int(os.environ["RIGHT"])
    table = {"reward": reward(read("answer.txt"), right), **components(read("talk.json"), right)}
    (LOGS / "verifier" / "reward.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main()
