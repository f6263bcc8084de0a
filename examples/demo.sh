#!/usr/bin/env bash
# The main job in one go: a real agent (mini-swe-agent) on real tasks in boxes, recorded, verified, trained on.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${DEMO:-runs/demo}
sandbox=${SANDBOX:-auto}

echo "== What works here"
polar doctor --model examples/policy/model

echo "== Collect: a scripted teacher through mini-swe-agent"
polar collect --config examples/demo-collect.yaml --sandbox "$sandbox" --out "$out/collect"

echo "== Train: GRPO, and held-out tasks before and after, sampled and greedy"
polar train --config examples/demo-train.yaml --sandbox "$sandbox" --out "$out/train"
