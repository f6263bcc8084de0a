#!/usr/bin/env bash
# Starts vLLM on the example policy, trains on it for twenty steps, and checks what a run on a server must hold.
# Usage: run.sh [RUN_FOLDER [further options of polar train]]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/vllm}
shift || true
bin=${BIN:-.venv/bin}
port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
mkdir -p "$out"
setsid examples/vllm/serve.sh examples/policy/model "$port" --max-model-len 4096 >"$out/vllm.log" 2>&1 &
server=$!
trap 'kill -- -"$server" 2>/dev/null || true' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
for _ in $(seq 600); do
  kill -0 "$server" 2>/dev/null || { tail -20 "$out/vllm.log"; exit 1; }
  "$bin/python" -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null && break
  sleep 1
done
"$bin/python" examples/vllm/make_tasks.py "$out/tasks.jsonl"
"$bin/polar" train "$out/tasks.jsonl" --config examples/vllm/train.yaml \
  --engine "vllm:http://127.0.0.1:$port" --out "$out/run" "$@"
"$bin/python" examples/vllm/check.py "$out/run"
