"""`polar train` with each of the trainers that run on TRL: rollouts of a small agent, one step, new weights served."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polarlike.rollouts.folder import RunFolder
from polarlike.store import Store

# Says two things; the verifier's reward is a bit of how long the second was, so that groups vary.
AGENT = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
for _ in range(2):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "go on"}]
open("said.txt", "w").write(json.dumps(messages))
"""
TEST = """
mkdir -p "$POLAR_LOGS/verifier"
echo $(($(wc -c < "$POLAR_WORKDIR/said.txt") % 2)) > "$POLAR_LOGS/verifier/reward.txt"
"""


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trl-grpo", "trl-async-grpo", "sft"])
def test_one_step_trains_and_its_weights_are_served(trainer: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [{"task_id": f"t{k}", "instruction": f"say {k}", "files": {}, "test_script": TEST} for k in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = {
        "tasks": str(tmp_path / "tasks.jsonl"),
        "out": str(tmp_path / "run"),
        "samples": 6,
        "engine": {"spec": f"embedded:{tiny_model}"},
        "harness": {"name": "shell", "options": {"command": f"python3 {tmp_path / 'agent.py'}"}},
        "sandbox": {"kind": "local"},
        "sampling": {"max_tokens": 12},
        "train": {"steps": 1, "tasks_per_step": 2, "eval_tasks": str(tmp_path / "tasks.jsonl"), "eval_samples": 1},
        "trainer": {"name": trainer, "settings": {"lr": 1e-3}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "polarlike", "train", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "run")
    [step] = [m for m in folder.metrics() if m["kind"] == "step"]
    assert (step["stepped"], step["policy_version"]) == (1, 1)
    assert step["trainable_tokens"] > 0
    store = Store(folder.store_url)
    evaluated = [r for r in store.rollouts() if r.group_id.startswith("eval0001/")]
    versions = {int(v) for r in evaluated for call in store.calls(r.session_id) for v in call.versions}
    assert versions == {1}
    assert (folder.path / "model" / "model.safetensors").is_file()
