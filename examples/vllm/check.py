"""What a run on a server must hold, read from its folder: exits with 1 where it does not.

Usage: python examples/vllm/check.py RUN
"""

import sys
from pathlib import Path

import numpy as np

from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.store import Store

MOST_MISMATCH = 1e-6
"""k3 between the engine's logprobs and the trainer's before its first update; both compute in float32."""


def main(run: Path) -> int:
    folder = RunFolder(run)
    store = Store(folder.store_url)
    steps = {m["step"]: m for m in folder.metrics() if m["kind"] == "step"}
    published = [m for m in folder.metrics() if m["kind"] == "publish"]
    serving = {m["step"]: m["policy_version"] for m in published}
    faults: list[str] = []

    wrong = tokens = 0
    for rollout in store.rollouts():
        version = serving[int(rollout.group_id.split("/")[0].removeprefix("step"))]
        for call in store.calls(rollout.session_id):
            tokens += call.versions.size
            wrong += int(np.sum(call.versions != version))
    if wrong or not tokens:
        faults.append(f"{wrong} of {tokens} tokens carry another version than the one that was served")

    evidence = audit(store, folder.engine_log)
    if evidence.trainable != evidence.equal or not evidence.trainable:
        faults.append(f"{evidence.equal} of {evidence.trainable} trainable tokens are as the server sent them")

    mismatch = max(abs(m["kl_k3"]) for m in steps.values())
    if not mismatch < MOST_MISMATCH:
        faults.append(f"k3 between engine and trainer reaches {mismatch:.1e}")

    rewards = [m["reward_mean"] for _, m in sorted(steps.items())]
    print(f"steps: {len(steps)}, policy versions served: {sorted(set(serving.values()))}")
    print(f"sampled tokens: {tokens}, of a wrong version: {wrong}")
    print(f"trainable tokens as the server sent them: {evidence.equal} of {evidence.trainable}")
    print(f"k3 of engine and trainer before the first update: at most {mismatch:.1e}")
    print(f"largest difference on a re-scored sample: {max(m['rescore_max'] for m in published):.1e}")
    print(f"mean reward, first and last quarter: {np.mean(rewards[:5]):.3f}, {np.mean(rewards[-5:]):.3f}")
    for fault in faults:
        print(f"NOT HELD: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
