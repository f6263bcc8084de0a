"""Writes tasks whose score is how short the last answer is: something that a policy of any size can learn in minutes.

Usage: python examples/vllm/make_tasks.py OUT.jsonl
"""

import json
import sys
from pathlib import Path

ASKED = (
    "Say hello.",
    "Name a colour.",
    "What do you call a young cat?",
    "Name the capital of France.",
    "What is two and two?",
    "Name an animal that swims.",
    "What is the opposite of cold?",
    "Name a month.",
)
AGENT = Path(__file__).with_name("agent.py")
# 1 for an answer of no more than 8 characters, 0 for one of 200 or more, and between them by the length.
TEST = """
mkdir -p "$POLAR_LOGS/verifier"
n=$(wc -m < "$POLAR_WORKDIR/said.txt")
awk -v n="$n" 'BEGIN { r = (200 - n) / 192; print (r > 1 ? 1 : (r < 0 ? 0 : r)) }' > "$POLAR_LOGS/verifier/reward.txt"
"""


def main(out: Path) -> None:
    lines = [
        {"task_id": f"short-{k}", "instruction": text, "files": {"agent.py": AGENT.read_text()}, "test_script": TEST}
        for k, text in enumerate(ASKED)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
