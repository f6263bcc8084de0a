"""Scores a run's trainable tokens again with a plain transformers forward and compares with what was recorded.

Each token is scored by the weights of the policy version that sampled it: the model the run started from, and the
checkpoints of a training run. Prints the mean, 99th percentile and largest absolute difference.

    python benchmarks/rescore.py runs/demo/train
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM

from polarlike.records import RolloutStatus, Segment
from polarlike.rollouts.folder import RunFolder
from polarlike.store import Store
from reconstruct import rebuild


def models(run: Path) -> dict[int, Path]:
    """Policy version to model folder."""
    engine = yaml.safe_load((run / "config.yaml").read_text())["engine"]
    kind, _, argument = engine["spec"].partition(":")
    found = {0: Path(argument if kind == "embedded" else engine["model"])}
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        version = json.loads((checkpoint / "trainer.json").read_text())["policy_version"]
        found[version] = checkpoint / "model"
    return found


def segments(run: Path) -> Iterator[Segment]:
    store = Store(RunFolder(run).store_url)
    for rollout in store.rollouts():
        if rollout.status in (RolloutStatus.FINISHED, RolloutStatus.UNSCORED):
            calls = store.calls(rollout.session_id)
            yield from rebuild(calls, rollout_id=rollout.rollout_id, task_id="", harness_ended=True).segments


@torch.no_grad()
def differences(model: torch.nn.Module, segment: Segment, mask: np.ndarray) -> np.ndarray:
    """|recorded - plain forward| at the masked positions, at the segment's temperature."""
    ids = torch.from_numpy(segment.ids.astype(np.int64))
    positions = np.flatnonzero(mask)
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0, positions - 1]
    logits = model.lm_head(hidden).float() / (segment.temperature or 1.0)
    logprobs = logits.log_softmax(-1).gather(1, ids[positions][:, None])[:, 0].numpy()
    return np.abs(logprobs - segment.logprobs[positions])


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a run again")
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    loaded = {v: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for v, p in models(run).items()}
    found: dict[int, list[np.ndarray]] = {}
    for segment in segments(run):
        for version in np.unique(segment.versions[segment.loss_mask]).tolist():
            mask = segment.loss_mask & (segment.versions == version)
            found.setdefault(version, []).append(differences(loaded[version], segment, mask))
    for version, pieces in sorted(found.items()):
        print(line(f"version {version}", np.concatenate(pieces)))
    print(line("all", np.concatenate([d for pieces in found.values() for d in pieces])))


def line(name: str, d: np.ndarray) -> str:
    return f"{name}: {d.size} tokens, mean {d.mean():.1e}, p99 {np.quantile(d, 0.99):.1e}, max {d.max():.1e}"


if __name__ == "__main__":
    main()
