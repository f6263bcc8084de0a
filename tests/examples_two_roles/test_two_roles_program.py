"""The two-role program: what it asks of whom, and what it makes of the replies."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.two_roles.program import play

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "two_roles" / "program.py"
ITEM = "In stock: dalu 8, keto 5.\nCount dalu."


def played(*replies: str) -> tuple[int | None, list[str], list[dict[str, Any]]]:
    """The answer, whom the program asked, and its talk, when the agents say these things in turn."""
    talk: list[dict[str, Any]] = []
    game, asked, said = play(ITEM, talk), [], iter([None, *replies])
    while True:
        try:
            model, _ = game.send(next(said))
        except StopIteration as end:
            assert next(said, "all said") == "all said"
            return end.value, asked, talk
        asked.append(model)


@pytest.mark.parametrize(
    ("replies", "answer", "asked"),
    [
        (("Count dalu 8", "Count dalu 8 fine"), 8, "SC"),
        (("Count dalu 5", "Count dalu 8 low", "Count dalu 8", "Count dalu 8 fine"), 8, "SCSC"),
        (("Count dalu 8", "Count keto 5 high", "Count dalu 8"), 8, "SCS"),
        (("Count dalu 5", "low", "Count dalu 8", "high"), None, "SCSC"),
        (("Count dalu", "8", "fine"), 8, "SSC"),
        (("dalu", "keto"), None, "SS"),
        (("8 dalu", "Count dalu 5", "low"), None, "SSC"),
        (("Count dalu 5", ""), 5, "SC"),
        (("Count dalu 5", "low or so"), 5, "SC"),
    ],
    ids=[
        "accepted at once", "mended", "an answer that is repeated stands", "refused to the end", "no number at first",
        "never a number", "the number must end the reply", "silence is no objection", "the verdict must end the reply",
    ],
)  # fmt: skip
def test_who_is_asked_and_what_is_answered(replies: tuple[str, ...], answer: int | None, asked: str) -> None:
    found, models, _ = played(*replies)
    assert found == answer
    assert "".join(model[0].upper() for model in models) == asked


def test_the_talk_says_what_each_agent_was_understood_to_say() -> None:
    _, _, talk = played("Count dalu 5", "Count dalu 8 low", "none")
    assert talk == [
        {"role": "solver", "number": 5},
        {"role": "checker", "verdict": "low"},
        {"role": "solver", "number": None},
    ]


class FakeProxy(HTTPServer):
    """Answers chat completions with the given replies in turn and keeps what it was sent."""

    def __init__(self, replies: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.requests = iter(replies), []


class Handler(BaseHTTPRequestHandler):
    server: FakeProxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        message = {"role": "assistant", "content": next(self.server.replies)}
        answer = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def run_program(folder: Path, replies: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    with FakeProxy(replies) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        env = {
            "OPENAI_BASE_URL": f"http://127.0.0.1:{proxy.server_port}/v1",
            "OPENAI_API_KEY": "k",
            "POLAR_INSTRUCTION": ITEM,
        }
        try:
            subprocess.run([sys.executable, "-I", PROGRAM], cwd=folder, env=env, check=True, timeout=60)
        finally:
            proxy.shutdown()
            thread.join()
        return proxy.requests


def test_each_agent_is_called_under_its_own_model_name_and_the_solver_in_one_conversation(tmp_path: Path) -> None:
    requests = run_program(tmp_path, ["Count dalu 5", "Count dalu 8 low", "Count dalu 8", "Count dalu 8 fine"])
    assert {(path, key) for path, key, _ in requests} == {("/v1/chat/completions", "Bearer k")}
    solver = [body["messages"] for _, _, body in requests if body["model"] == "solver"]
    assert solver[1] == [
        *solver[0],
        {"role": "assistant", "content": "Count dalu 5"},
        {"role": "user", "content": "It is low."},
    ]
    checker = [body["messages"] for _, _, body in requests if body["model"] == "checker"]
    assert checker == [[{"role": "user", "content": f"{ITEM}\nClaim {n}"}] for n in (5, 8)]
    assert (tmp_path / "answer.txt").read_text() == "8"
    assert [turn["role"] for turn in json.loads((tmp_path / "talk.json").read_text())] == ["solver", "checker"] * 2


def test_a_game_without_an_answer_says_so(tmp_path: Path) -> None:
    run_program(tmp_path, ["dalu", "dalu"])
    assert (tmp_path / "answer.txt").read_text() == "none"
