"""The gateway benchmark: its clients, its stand-in for a vLLM server, its counting, and a whole quick run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.gateway import agents
from benchmarks.gateway.evidence import agreement, context
from benchmarks.gateway.setups import Kept
from benchmarks.gateway.upstream import Policy, Upstream
from benchmarks.table import END, START, between, chief_figures, figure, gateway_table, number, trainers_table
from polarlike.templates import load_template

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/policy/model"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "tools": agents.TOOLS}


def upstream(*, evidence: bool) -> Upstream:
    return Upstream(Policy(MODEL, 5, letters=evidence), delay=0, bytes_per_token=4.0, evidence=evidence)


async def asked(served: Upstream, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with TestClient(TestServer(served.app())) as client:
        got: dict[str, Any] = await (await client.post(path, json=body)).json()
        return got


# ------------------------------------------------------------ clients


def test_conversations_share_no_text_but_the_system_prompt_and_the_tools() -> None:
    texts = [t for s in agents.scripts(20, 10, seed=3) for t in (s.task, *s.results)]
    assert len(texts) == 200
    starts = {" ".join(t.split()[:4]) for t in texts}
    assert len(starts) == 200


def test_the_same_seed_says_the_same_and_another_seed_does_not() -> None:
    assert agents.scripts(2, 3, seed=1) == agents.scripts(2, 3, seed=1)
    assert agents.scripts(1, 3, seed=1)[0].task != agents.scripts(1, 3, seed=2)[0].task


# ------------------------------------------------------------ the stand-in


async def test_completions_answer_ids_whose_text_is_a_tool_call_with_a_logprob_each() -> None:
    asking = {"prompt": [5, 6, 7], "max_tokens": 500, "logprobs": 0, "return_token_ids": True}
    got = await asked(upstream(evidence=False), "/v1/completions", asking)
    choice = got["choices"][0]
    template = load_template(MODEL)
    parsed = template.parse(np.asarray([5, 6, 7], np.int32), np.asarray(choice["token_ids"], np.int32), None)
    [call] = parsed.message["tool_calls"]
    assert call["function"]["name"] == "bash"
    assert len(json.loads(call["function"]["arguments"])["command"].split()) == 6  # echo and five words
    assert choice["token_ids"][-1] in template.stop_ids
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert all(p <= 0 for p in choice["logprobs"]["token_logprobs"])


async def test_completions_stop_at_sixteen_tokens_where_no_limit_is_given() -> None:
    got = await asked(upstream(evidence=False), "/v1/completions", {"prompt": [5], "return_token_ids": True})
    assert len(got["choices"][0]["token_ids"]) == 16
    assert got["choices"][0]["finish_reason"] == "length"


async def test_a_stream_of_pieces_holds_every_token_once_and_the_prompt_in_its_first_piece() -> None:
    asking = {"prompt": [5, 6], "max_tokens": 500, "logprobs": 0, "return_token_ids": True}
    asking |= {"stream": True, "stream_interval": 8}
    async with TestClient(TestServer(upstream(evidence=False).app())) as client:
        lines = (await (await client.post("/v1/completions", json=asking)).text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    whole = await asked(upstream(evidence=False), "/v1/completions", asking | {"stream": False})
    assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [len(c["token_ids"]) for c in choices[:-1]] == [8] * (len(choices) - 1)
    assert [c.get("prompt_token_ids") for c in choices] == [[5, 6]] + [None] * (len(choices) - 1)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_likely_tokens_are_twice_as_far_apart_at_half_the_temperature() -> None:
    async def gap(temperature: float) -> float:
        asking = {"prompt": [5], "max_tokens": 1, "logprobs": 5, "temperature": temperature}
        got = await asked(upstream(evidence=False), "/v1/completions", asking)
        top = got["choices"][0]["logprobs"]["top_logprobs"][0]
        return float(top["token_id:0"] - top["token_id:4"])

    assert await gap(1.0) == pytest.approx(4.0)
    assert await gap(0.5) == pytest.approx(8.0)


async def test_a_chat_is_answered_without_ids_unless_they_are_asked_for() -> None:
    plain = await asked(upstream(evidence=False), "/v1/chat/completions", CHAT)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    full = await asked(upstream(evidence=False), "/v1/chat/completions", CHAT | {"return_token_ids": True})
    assert full["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "bash"
    assert full["prompt_token_ids"] and full["choices"][0]["token_ids"]


async def test_evidence_holds_rendered_prompts_and_every_second_reply_spells_a_word_in_letters() -> None:
    served = upstream(evidence=True)
    async with TestClient(TestServer(served.app())) as client:
        replies = [await (await client.post("/v1/chat/completions", json=CHAT)).json() for _ in range(2)]
        told = await (await client.get("/evidence")).json()
        counted = await (await client.get("/log")).json()
    rendered = load_template(MODEL).render(CHAT["messages"], CHAT["tools"]).tolist()
    assert [t["prompt_ids"] for t in told] == [rendered, rendered]
    assert [t["odd"] for t in told] == [False, True]
    word = json.loads(replies[1]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["command"].split()[
        1
    ]
    usual, odd = (len(t["completion_ids"]) for t in told)
    assert odd == usual + len(word)  # a space and the letters, where there was one token
    assert counted["calls"] == {"chat": 2, "completions": 0}


# ------------------------------------------------------------ counting


def test_a_prompt_is_exact_only_if_it_begins_with_the_whole_turn_before() -> None:
    def call(prompt: list[int], completion: list[int], odd: bool = False) -> dict[str, Any]:
        return {"prompt_ids": prompt, "completion_ids": completion, "odd": odd}

    two = [call([1, 2], [3]), call([1, 2, 3, 4], [5], odd=True), call([1, 2, 3, 4, 9, 6], [7])]
    other = [call([8], [9]), call([8, 9, 9], [1]), call([8, 9, 9, 2], [1])]
    assert context(two + other, turns=3) == {"continuing": 3, "exact": 2, "continuing_odd": 1, "exact_odd": 0}


def test_a_record_agrees_id_for_id_or_not_at_all() -> None:
    def kept(prompt: list[int], completion: list[int], logprobs: list[float]) -> Kept:
        return Kept(
            "r", np.asarray(prompt, np.int32), np.asarray(completion, np.int32), np.asarray(logprobs, np.float32)
        )

    truth = [{"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.1]}] * 3
    records = [kept([1, 2], [3], [-0.1]), kept([1], [3], []), kept([1, 2], [4], [-0.2])]
    assert agreement(records, truth) == {"prompt_ids": 2, "completion_ids": 2, "logprobs": 1}


@pytest.mark.parametrize(
    ("value", "said"), [(1234.4, "1,234"), (100.0, "100"), (99.94, "99.9"), (5.678, "5.68"), (-0.5, "-0.50")]
)
def test_numbers_have_three_digits(value: float, said: str) -> None:
    assert number(value) == said


def test_a_figure_says_its_spread_and_a_missing_one_is_a_dash() -> None:
    assert figure({"median": 2.0, "min": 1.5, "max": 12.25}) == "2.00 (1.50 to 12.2)"
    assert figure(None) == "-"


def test_rows_of_trainers_become_a_table_with_a_dash_where_one_has_no_figure() -> None:
    rows = [{"trainer": "grpo", "tokens/s": {"median": 2.0, "min": 1.0, "max": 3.0}}, {"trainer": "sft", "steps": 4}]
    assert trainers_table({"rows": rows, "notes": ["One step each."]}).splitlines() == [
        "| trainer | tokens/s | steps |",
        "| --- | --- | --- |",
        "| grpo | 2.00 (1.00 to 3.00) | - |",
        "| sft | - | 4.00 |",
        "",
        "- One step each.",
    ]


# ------------------------------------------------------------ all of it


@pytest.mark.slow
def test_a_quick_run_counts_every_call_three_times_alike(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.gateway", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert set(found) == {
        *("benchmark", "machine", "versions", "workload", "setups", "kept", "counts", "notes", "runs"),
    }
    made = 3 * (4 + 1 + 4)  # turns of the conversations that warm, and of those held one and four at once
    assert found["counts"] == {
        "bare": {"made": made, "recorded": 0, "upstream": made},
        "polarlike": {"made": made, "recorded": made, "upstream": made},
    }
    assert {"calls_per_s_4", "added_continuing_p50_ms", "disk_bytes_per_call"} <= set(found["setups"]["polarlike"])
    kept = found["kept"]["polarlike"]
    assert kept["prompt_ids"] == kept["completion_ids"] == kept["logprobs"] == kept["calls"] == 12
    assert (kept["exact"], kept["exact_odd"]) == (kept["continuing"], kept["continuing_odd"])
    assert kept["received"] >= 6 and kept["lost"] == 0
    assert gateway_table(found) in done.stdout
    assert "| CPU a call, ms |" in chief_figures(found, None)


def test_a_table_takes_the_place_of_what_stood_between_its_marks() -> None:
    page = f"# A page\n\n{START}\nold\n{END}\n\nMore.\n"
    assert between(page, "| new |") == f"# A page\n\n{START}\n| new |\n{END}\n\nMore.\n"
    with pytest.raises(ValueError, match="end of benchmarks"):
        between("# A page", "| new |")
