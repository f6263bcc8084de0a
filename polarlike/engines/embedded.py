"""An engine inside this process: a Hugging Face causal model on torch, batched, with one prefix tree for all sessions.

This module knows requests and asyncio; the thread that owns torch is `worker`, what it computes is `batch`. What holds:
nothing here blocks the event loop; every token carries the logprob of the distribution it was drawn from and the
version of the weights that gave it; new weights act between two tokens, and a running request goes on under them, its
keys and values computed anew.

At temperature 0 a token's logprob is that of temperature 1 (see `sampling`).

Settings (`EngineOptions.extra`): kv_tokens, how many tokens the pool of keys and values holds (at least the context
length; by default what 1 GiB holds); prefill_chunk, most prompt tokens in one pass (512); device (cpu, cuda; by default
cuda where there is one); threads, torch's threads, for the whole process (by default torch's own choice; 1 where
agents fill the other cores: a pass waits for the slowest thread); stream_interval_s, least time between two chunks of a
reply (0.05).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polarlike.engines.attention import NAME, packed_attention
from polarlike.engines.base import Chunk, EngineError, EngineOptions, GenerateRequest, PolicyWeights
from polarlike.engines.batch import Batch, Sequence
from polarlike.engines.checks import check_sampling, room_left
from polarlike.engines.log import EngineLog
from polarlike.engines.sampling import History, Uniforms, derived_seed, needs_history
from polarlike.engines.worker import Running, Worker
from polarlike.plugins import nearest
from polarlike.records import Ids, Logprobs, Sampling, UsageError
from polarlike.templates import ChatTemplate, load_template

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POOL_BYTES = 1 << 30


@dataclass(slots=True)
class Settings:
    """`EngineOptions.extra`, checked; see the module's docstring."""

    kv_tokens: int | None = None
    prefill_chunk: int = 512
    device: str | None = None
    threads: int | None = None
    stream_interval_s: float = 0.05

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        for key in extra:
            if key not in cls.__slots__:
                raise UsageError(f"The embedded engine has no setting {key!r}{nearest(key, cls.__slots__)}")
        return cls(**extra)


def create(argument: str, options: EngineOptions) -> EmbeddedEngine:
    """argument: a Hugging Face model folder. Raises UsageError where it is none or its template is unknown."""
    return EmbeddedEngine(Path(argument), options)


class EmbeddedEngine:
    """An `Engine`. The weights are read by `start`, everything else is known from the start."""

    name = "embedded"
    text_only = False

    def __init__(self, model_dir: Path, options: EngineOptions):
        from transformers import AutoConfig

        self.template: ChatTemplate | None = load_template(
            model_dir, renderer=options.renderer, thinking=options.thinking
        )
        self.model_name = model_dir.name
        self.policy_version = 0
        self._settings = Settings.of(options.extra)
        if options.dtype not in DTYPES:
            raise UsageError(f"There is no dtype {options.dtype!r}; set it to one of {', '.join(DTYPES)}.")
        self._config: Any = AutoConfig.from_pretrained(str(model_dir)).get_text_config()
        _check_architecture(self._config)
        self.context_length = int(self._config.max_position_embeddings)
        kv_tokens = self._settings.kv_tokens
        if kv_tokens is not None and kv_tokens < self.context_length:
            raise UsageError(f"kv_tokens is {kv_tokens}; set it to the context length {self.context_length} or more.")
        self._model_dir, self._options = model_dir, options
        self._log = EngineLog(options.log)
        self._worker: Worker | None = None
        self._requests = 0

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start: tokens of prompts, how many of them were found in the prefix tree, tokens put
        through the model, tokens sampled, passes, tokens computed anew for new weights, preemptions, evictions."""
        batch = self._worker.batch if self._worker is not None else None
        return {} if batch is None else {**batch.stats, "evicted_tokens": batch.tree.evicted}

    async def start(self) -> None:
        assert self.template is not None
        if self._worker is None:
            self._worker = Worker(self._build, self._log, self.template.decode, self._settings.stream_interval_s)
        await asyncio.wrap_future(self._worker.ready)

    async def close(self) -> None:
        """Running requests end with an EngineError; the log is whole when this returns."""
        if self._worker is not None:
            await asyncio.to_thread(self._worker.close)
        self._log.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Raises EngineError for a prompt or sampling parameters that cannot be served."""
        running = self._running(request)
        worker = self._started()
        worker.start_request(running)
        finished = False
        try:
            while not finished:
                item = await running.chunks.get()
                if isinstance(item, EngineError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                worker.abort(running)

    async def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """float32 [len(ids) - start]: log-softmax of fp32 logits / temperature; temperature 0 counts as 1."""
        self._check_ids(ids)
        if not 1 <= start <= ids.size:
            raise EngineError(f"The first token to score is {start} of {ids.size}; it must have a token before it.")
        if ids.size > self.context_length:
            raise EngineError(f"{ids.size} tokens do not fit the model's context of {self.context_length}.")
        if start == ids.size:
            return np.zeros(0, np.float32)
        sequence = Sequence(ids.astype(np.int32), int(ids.size), start - 1, Sampling(temperature=temperature))
        scores: Logprobs = await asyncio.wrap_future(self._started().score(sequence))
        return scores

    async def publish(self, weights: PolicyWeights, version: int) -> None:
        def swap(batch: Batch) -> None:
            if version <= self.policy_version:
                raise EngineError(f"Policy version {version} is not above the current one, {self.policy_version}.")
            batch.load(weights.tensors(), version)
            self.policy_version = version

        await asyncio.wrap_future(self._started().call(swap))

    # ------------------------------------------------------------ inside

    def _started(self) -> Worker:
        if self._worker is None:
            raise EngineError("The embedded engine has not been started; await its start() first.")
        return self._worker

    def _running(self, request: GenerateRequest) -> Running:
        self._check_ids(request.prompt_ids)
        check_sampling(request.sampling)
        prompt, sampling = request.prompt_ids, request.sampling
        limit = room_left(int(prompt.size), self.context_length, sampling.max_tokens)
        ids = np.empty(prompt.size + limit, np.int32)
        ids[: prompt.size] = prompt
        seed = sampling.seed if sampling.seed is not None else derived_seed(self._options.seed, self._requests)
        self._requests += 1
        sequence = Sequence(
            ids,
            int(prompt.size),
            int(prompt.size) - 1,
            sampling,
            uniforms=Uniforms(seed),
            history=History(prompt, int(self._config.vocab_size)) if needs_history(sampling) else None,
        )
        return Running(request, sequence, asyncio.get_running_loop(), asyncio.Queue(), limit)

    def _check_ids(self, ids: Ids) -> None:
        if not ids.size:
            raise EngineError("The prompt is empty; send at least one token.")
        if int(ids.min()) < 0 or int(ids.max()) >= self._config.vocab_size:
            raise EngineError(f"The prompt has a token id outside the model's vocabulary of {self._config.vocab_size}.")

    def _build(self) -> Batch:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, packed_attention)
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        device = self._settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = DTYPES[self._options.dtype]
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(self._model_dir), dtype=dtype, attn_implementation=NAME, local_files_only=True
        )
        model = model.to(device).eval().requires_grad_(False)
        return Batch(
            model,
            places=self._settings.kv_tokens or self._default_places(dtype),
            prefill=self._settings.prefill_chunk,
            limit=self._options.max_batch,
        )

    def _default_places(self, dtype: torch.dtype) -> int:
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes: int = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
        return max(POOL_BYTES // token_bytes, self.context_length)


def _check_architecture(config: Any) -> None:
    """Raises UsageError for attention that `attention` does not compute."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise UsageError(
            f"The embedded engine computes plain full attention and {config.model_type} needs more; serve this model "
            "with vllm:URL."
        )
