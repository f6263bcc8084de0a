#!/usr/bin/env bash
# A vLLM server as `polar train --engine vllm:URL` wants it, on the CPU build in .venv-vllm (made by `make vllm`).
# Usage: serve.sh MODEL_DIR PORT [further flags of vllm serve]
#   logprobs-mode    the logprobs of what was sampled, at any temperature
#   dev mode         /pause, /resume, /collective_rpc, /reset_prefix_cache, for weights published as a whole
#   LoRA             an adapter a policy version; one more than the versions that replies still run under
set -euo pipefail
model=$1 port=$2
shift 2
python="$(cd "$(dirname "$0")/../.." && pwd)/.venv-vllm/bin/python"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
# With --enforce-eager little is compiled, and what is costs the first request half a minute.
export TORCH_COMPILE_DISABLE=1
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_CPU_CI_ENV="${VLLM_CPU_CI_ENV:-1}"
exec "$python" -m vllm.entrypoints.cli.main serve "$model" --host 127.0.0.1 --port "$port" \
  --dtype float32 --enforce-eager --max-num-seqs 32 --logprobs-mode processed_logprobs \
  --enable-lora --max-lora-rank 16 --max-loras 4 "$@"
