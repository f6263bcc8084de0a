"""Two agents in one program: a solver reads a number off a list, a checker says whether it is right.

Standard library alone. Each agent is called under a model name of its own, `solver` and `checker`; that is all it takes
to make them roles. Writes what the two agree on, or "none", to answer.txt, and what was said to talk.json.
"""

import json
import os
import re
import urllib.request
from pathlib import Path

ATTEMPTS = 2
VERDICTS = ("fine", "high", "low")


def play(item, talk):
    """One game over `item`, a text that says what to count. A generator: it yields (model name, messages) and is sent
    the reply's text. Appends to `talk` what each agent was understood to say, and returns the answer or None.

    The checker sees each answer afresh. On "high" or "low" the solver is told so and answers again; an answer that it
    repeats stands, one that is refused to the end is not given, and a reply that holds no number is not checked.
    """
    messages = [{"role": "user", "content": item}]
    before = None
    for _ in range(ATTEMPTS):
        reply = yield "solver", messages
        found = re.search(r"\b\d{1,9}$", reply.strip())
        number = int(found[0]) if found else None
        talk.append({"role": "solver", "number": number})
        if number is None:
            hint = "not a number"
        elif number == before:
            return number
        else:
            said = yield "checker", [{"role": "user", "content": f"{item}\nClaim {number}"}]
            hint = next((word for word in said.split()[-1:] if word in VERDICTS), "fine")
            talk.append({"role": "checker", "verdict": hint})
            if hint == "fine":
                return number
        before = number
        messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": f"It is {hint}."}]
    return None


def ask(model, messages):
    """What the model says: one chat completion from the server that the environment names."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def main():
    talk = []
    game = play(os.environ["POLAR_INSTRUCTION"], talk)
    reply = None
    try:
        while True:
            reply = ask(*game.send(reply))
    except StopIteration as end:
        Path("answer.txt").write_text("none" if end.value is None else str(end.value))
    Path("talk.json").write_text(json.dumps(talk))


if __name__ == "__main__":
    main()
