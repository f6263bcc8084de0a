"""One schema for every command. A YAML file fills it, flags override it, and an unknown key is an error with its
nearest name. Each field's sentence stands under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polarlike.proxy.settings import Rule, SamplingSettings
from polarlike.records import UsageError
from polarlike.strict import explain


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class EngineConfig(Strict):
    spec: str = ""
    """embedded:MODEL_DIR, vllm:URL, sglang:URL, scripted:FILE or remote:MODEL (see docs/engines.md)."""
    model: Path | None = None
    """Model folder that a server (vllm:URL, sglang:URL) serves, for its tokenizer and to start training from; gives a
    scripted engine its tokens and logprobs, and without one its sessions are text-only."""
    renderer: str | None = None
    """Chat-template family, where the model folder does not tell (for example qwen3)."""
    thinking: bool = False
    """Whether the policy thinks before it answers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the embedded engine, or the one that a server was started with; float32 logprobs agree with the
    trainer's to 1e-4."""
    max_batch: int = Field(default=64, ge=1)
    """Replies the embedded engine samples at once."""
    options: dict[str, Any] = {}
    """The engine's own settings (embedded: kv_tokens, prefill_chunk, threads, device; vllm: publish, weights,
    timeout_s, stream_interval; sglang: the first three; scripted: delay_s, stream; remote: api_base, timeout_s)."""
    log: bool = False
    """Write the engine's own evidence log (engine.jsonl in the run folder)."""

    @property
    def model_folder(self) -> Path | None:
        """The model whose tokens are sampled: the embedded engine's, or the one given to a scripted engine."""
        kind, _, argument = self.spec.partition(":")
        return Path(argument) if kind == "embedded" else self.model


class HarnessConfig(Strict):
    name: str = "mini-swe-agent"
    """A registered harness; see polar doctor."""
    options: dict[str, Any] = {}
    """The harness's own settings."""


class SandboxConfig(Strict):
    kind: str = "docker"
    """docker, local (no isolation: development only), or auto: docker where it works, else local."""
    options: dict[str, Any] = {}
    """The sandbox's own settings."""


class SessionConfig(Strict):
    streaming: Literal["whole", "live"] | None = None
    """How replies are streamed; the harness's own choice when not set."""
    on_edit: Literal["keep", "fork"] = "keep"
    """When a harness sends a sampled turn back changed: keep the sampled tokens, or start a new segment."""
    grace_s: float = Field(default=30.0, ge=0)
    """Seconds a reply is sampled on after its client has gone."""
    rewrites: list[Rule] = []
    """Volatile spans to rewrite, besides the harness's own."""


class LimitsConfig(Strict):
    agent_s: float | None = Field(default=None, gt=0)
    """Seconds an agent may run; the task's own limit when not set."""
    verifier_s: float | None = Field(default=None, gt=0)
    """Seconds a verifier may run; the task's own limit when not set."""
    max_calls: int | None = Field(default=None, ge=0)
    """Model calls a rollout may make; 0 is no limit."""
    on_time_limit: Literal["grade", "discard"] = "grade"
    """Whether the work of an agent that ran out of time is judged, or the rollout stays unscored."""
    retries: int = Field(default=2, ge=0)
    """How often a rollout is run again after a fault of ours."""


class TrainerConfig(Strict):
    name: str = "grpo"
    """A registered trainer."""
    settings: dict[str, Any] = {}
    """The trainer's own settings."""


class TrainConfig(Strict):
    steps: int = Field(default=2, ge=1)
    """Training steps."""
    tasks_per_step: int = Field(default=4, ge=1)
    """Groups a step."""
    eval_tasks: str | None = None
    """Tasks evaluated before the first step and after the last."""
    eval_samples: int = Field(default=1, ge=1)
    """Rollouts a task in those evaluations."""
    eval_greedy: bool = False
    """Also one rollout a task at temperature 0 in those evaluations."""
    eval_every: int = Field(default=0, ge=0)
    """Also evaluate every so many steps; 0 is only before and after."""
    rescore_max: float | None = Field(default=None, gt=0)
    """Most that engine and trainer may differ on the logprob of any token of the sample that both score after weights
    were published; unset: 1e-3 where engine.dtype is float32, else no limit."""
    rescore_mean: float | None = Field(default=None, gt=0)
    """The same for the mean over that sample; unset: 0.1 where engine.dtype is bfloat16, else no limit."""
    shuffle_rewards: bool = False
    """A control: each group's rewards are dealt out anew before the trainer sees them, so nothing should be learned."""
    keep_checkpoints: int = Field(default=0, ge=0)
    """How many checkpoints to keep; 0 keeps all, so that every policy version can score its tokens again."""


class RunConfig(Strict):
    tasks: str = ""
    """A task folder, a folder of them, or a JSONL file."""
    limit: int = Field(default=0, ge=0)
    """Only the first so many tasks; 0 is all."""
    out: Path = Path("runs/run")
    """The run folder; the same command again resumes it."""
    store: str = Field(default="", repr=False)
    """Where calls are kept: postgresql://USER@HOST/DATABASE, which many runs may share; when not set, a SQLite file in
    the run folder. The password is better given as PGPASSWORD or in ~/.pgpass, which polar show reads too."""
    samples: int = Field(default=4, ge=1)
    """Rollouts a task."""
    concurrency: int = Field(default=4, ge=1)
    """Rollouts at once."""
    seed: int = 0
    """Seed of task order and sampling."""
    builder: str = "exact"
    """How calls become segments: exact or per_request."""
    engine: EngineConfig = EngineConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sampling: SamplingSettings = SamplingSettings()
    session: SessionConfig = SessionConfig()
    limits: LimitsConfig = LimitsConfig()
    trainer: TrainerConfig = TrainerConfig()
    train: TrainConfig = TrainConfig()


def load_config(file: Path | None, overrides: dict[str, Any]) -> RunConfig:
    """The file's settings with `overrides` (dotted names to values; None is not given) over them. Raises UsageError."""
    data: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text())
        except OSError as e:
            raise UsageError(f"Cannot read the config {file}: {e.strerror}.") from e
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise UsageError(f"The config {file} is not valid YAML: {' '.join(str(e).split())}.") from e
        if not isinstance(loaded, dict | None):
            raise UsageError(f"The config {file} must be a table of settings.")
        data = loaded or {}
    for dotted, value in overrides.items():
        if value is None:
            continue
        table = data
        *path, last = dotted.split(".")
        for part in path:
            table[part] = table.get(part) or {}
            table = table[part]
            if not isinstance(table, dict):
                raise UsageError(f"The setting {part!r} in {file} must be a table of settings, not {table!r}.")
        table[last] = value
    try:
        return RunConfig.model_validate(data)
    except ValidationError as e:
        said = explain(e, RunConfig, "setting")
        raise UsageError(said[0].upper() + said[1:]) from e


def parse_settings(given: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts, the value in YAML, as overrides. Raises UsageError."""
    settings = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found or not name:
            raise UsageError(f"--set {text} has no value; write it as NAME=VALUE, for example train.steps=4.")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as e:
            raise UsageError(f"The value of --set {text} is not valid YAML; quote it.") from e
    return settings


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
