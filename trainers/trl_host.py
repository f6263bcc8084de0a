"""Our trainer contract around one of TRL's trainers: arguments, one run of its loop a step, weights, checkpoints.

It knows TRL's configuration, the loop of transformers' Trainer that TRL builds on, and PEFT; no loss, no rows. A step
is one call of that Trainer's `train`: the optimizer lives on from call to call, everything else of a call is set here.

What holds:
- Weights change by TRL's own optimizer step alone; a step whose gradient is not finite changes nothing and is counted.
- TRL sends no usage report from here, and writes no file but what this module saves.
- Given the seed, the weights and the groups, a step is a function, up to rounding.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as hf_logging

from polarlike.engines.base import PolicyWeights
from polarlike.plugins import nearest
from polarlike.records import Ids, Logprobs, PolarError, UsageError
from trainers import adapter, checkpoints
from trainers.base import TrainerOptions
from trainers.model_folder import copy_tokenizer, load_model, no_progress_bars
from trainers.trl_settings import TrlSettings

VERSION = "1.16"
"""The release of TRL whose insides these modules rely on."""

OURS: dict[str, str] = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "num_iterations": "epochs",
    "num_train_epochs": "epochs",
    "gradient_checkpointing": "recompute_layers",
    "activation_checkpointing": "recompute_layers",
    "per_device_train_batch_size": "micro_batch_tokens",
    "token_budget": "micro_batch_tokens",
    "bf16": "dtype",
    "use_cpu": "device",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "beta": "kl_coef",
    "temperature": "temperature",
    "scale_rewards": "advantage",
}
"""Arguments of TRL for which the trainers have an option of their own, and its name."""

FIXED = (
    "output_dir", "max_steps", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations", "seed", "use_vllm", "weight_sync_steps", "max_staleness", "fp16", "auto_find_batch_size",
    "save_strategy", "save_steps", "eval_strategy", "do_eval", "logging_steps", "logging_strategy",
    "logging_nan_inf_filter", "report_to", "disable_tqdm", "remove_unused_columns", "push_to_hub",
)  # fmt: skip
"""Arguments that the step contract fixes."""


def arguments(
    config: type, options: TrainerOptions, settings: TrlSettings, usual: dict[str, Any] | None = None, **own: Any
) -> Any:
    """TRL's configuration from ours. own: what the trainer at hand sets besides; usual: where it departs from TRL's
    defaults, and `trl` may take that back.

    Raises UsageError on a key of `trl` that TRL lacks, that an option of ours stands for, or that TRL refuses.
    """
    known = {field.name for field in dataclasses.fields(config)}
    for name in settings.trl:
        if name not in known:
            raise UsageError(f"The trainer's settings: TRL {VERSION} has no argument {name!r}{nearest(name, known)}")
        if name in OURS:
            raise UsageError(f"The trainer's settings: set {OURS[name]!r} in place of {name!r} in the table 'trl'.")
        if name in FIXED or name in own:
            raise UsageError(
                f"The trainer's settings: {name!r} in the table 'trl' is set by the trainer; leave it out."
            )
    values: dict[str, Any] = {
        "output_dir": str(options.out / "trl"),
        "seed": options.seed,
        "learning_rate": settings.lr,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "gradient_checkpointing": None,  # the old name of the next, and on unless it is unset
        "activation_checkpointing": settings.recompute_layers,
        "bf16": settings.dtype == "bfloat16",
        "use_cpu": settings.device == "cpu" or not torch.cuda.is_available(),
        "lr_scheduler_type": "constant",
        "max_steps": 1,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **own,
        **(usual or {}),
        **settings.trl,
    }
    try:
        return config(**values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"The trainer's settings: {str(error).splitlines()[0].rstrip('.')}.") from None


def check_machine(settings: TrlSettings) -> None:
    """Raises UsageError where these trainers cannot run."""
    if not trl.__version__.startswith(f"{VERSION}."):
        raise UsageError(
            f"The TRL trainers are written for TRL {VERSION} and {trl.__version__} is installed; "
            f"run: pip install 'trl=={VERSION}.*'."
        )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("The trainer cannot use device cuda (there is none here); set device: cpu or auto.")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers and TRL warn of, which would run across the command's progress: their notes are on
    arguments and names that are used here, not by the user."""
    loud, trl_logger = hf_logging.get_verbosity(), logging.getLogger("trl")
    level = trl_logger.level
    hf_logging.set_verbosity(logging.ERROR)
    trl_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        hf_logging.set_verbosity(loud)
        trl_logger.setLevel(level)


def without_dropout(model: Any) -> None:
    """As the engine samples: a fresh policy's ratio is then exactly its numerical mismatch."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


class Driven:
    """Mixed in before one of TRL's trainers, which is then driven step by step. feed: what its next `train` goes
    through, one item a micro-batch."""

    feed: list[Any]
    skipped: int = 0

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.feed, batch_size=None, collate_fn=_same)  # type: ignore[arg-type]

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        if not math.isfinite(norm):
            model.zero_grad(set_to_none=True)  # the optimizer passes over parameters without a gradient
            self.skipped += 1
        return norm

    def _send_telemetry(self) -> None:
        pass


def _same(item: Any) -> Any:
    return item


class Host:
    """The trainer contract, but for `step`. build: makes the TRL trainer, a `Driven` one."""

    def __init__(self, options: TrainerOptions, settings: TrlSettings, build: Callable[[], Any]) -> None:
        check_machine(settings)
        self.policy_version = 0
        self.rng = np.random.default_rng(options.seed)
        self._start, self._seed = options.model, options.seed
        with no_progress_bars(), quiet():
            self.trl = build()
        if self.trl.accelerator.num_processes > 1 or self.trl.args.n_gpu > 1:
            raise UsageError("The TRL trainers run in one process on one device; set CUDA_VISIBLE_DEVICES to one.")
        for callback in (PrinterCallback, ProgressCallback):
            self.trl.remove_callback(callback)
        without_dropout(self.model)
        self.trl.create_optimizer()

    @property
    def model(self) -> Any:
        return self.trl.accelerator.unwrap_model(self.trl.model)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trl.accelerator.device
        return device

    @property
    def adapted(self) -> bool:
        return hasattr(self.model, "merge_adapter")

    # ------------------------------------------------------------ a step

    def train(self, optimizer_steps: int, micro_batches: int) -> list[dict[str, float]]:
        """Runs TRL's loop for that many optimizer steps of that many micro-batches each; returns what TRL logged of
        each (loss, grad_norm and its own metrics). `policy_version` is raised if weights changed."""
        args = self.trl.args
        args.max_steps, args.gradient_accumulation_steps = optimizer_steps, micro_batches
        self.trl.skipped = 0
        seed = np.random.SeedSequence([self._seed, self.policy_version]).generate_state(1)[0]
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(int(seed))
            self.trl.train()
        if self.trl.skipped < optimizer_steps:
            self.policy_version += 1
        return [entry for entry in self.trl.state.log_history if "loss" in entry]

    @staticmethod
    def finite(log: Mapping[str, float]) -> bool:
        """Whether an optimizer step that TRL logged changed weights."""
        return math.isfinite(log["grad_norm"])

    def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """float32 [len(ids) - start]."""
        return self.score_with(ids, start, temperature)

    def score_with(self, ids: Ids, start: int, temperature: float, **extra: Any) -> Logprobs:
        """`score`, with what the model's attention needs besides."""
        model = self.model
        training = model.training
        model.eval()
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        with torch.no_grad(), self.trl.accelerator.autocast():
            logits = model(input_ids=tokens[None], use_cache=False, **extra).logits[0, start - 1 : -1]
        model.train(training)
        logs = (logits.float() / temperature).log_softmax(-1)
        scores: Logprobs = logs.gather(1, tokens[start:, None])[:, 0].cpu().numpy()
        return scores

    # ------------------------------------------------------------ weights and checkpoints

    def weights(self) -> PolicyWeights:
        return PolicyWeights(self.tensors, self.save_model, self.save_adapter if self.adapted else None)

    def tensors(self) -> Mapping[str, Tensor]:
        """The state dict; its tensors are the live parameters, save those an adapter was multiplied into."""
        state: Mapping[str, Tensor] = adapter.merged(self._base) if self.adapted else self.model.state_dict()
        return state

    @property
    def _base(self) -> Any:
        return self.model.get_base_model() if self.adapted else self.model

    def save_model(self, folder: Path) -> None:
        """The policy as a Hugging Face folder in float32, with the tokenizer and chat template it started with."""
        with checkpoints.saving(folder), no_progress_bars():
            folder.mkdir(parents=True, exist_ok=True)
            self._base.save_pretrained(folder, state_dict=dict(self.tensors()))
            copy_tokenizer(self._start, folder)

    def save_adapter(self, folder: Path) -> None:
        with checkpoints.saving(folder):
            adapter.save(self.model, folder)

    def save(self, folder: Path) -> None:
        """A checkpoint: model/ or, with LoRA, adapter/ alone; optimizer.pt, trainer.json and a manifest."""
        checkpoints.write(folder, self._fill)

    def _fill(self, folder: Path) -> None:
        if self.adapted:
            adapter.save(self.model, folder / "adapter")
        else:
            self.save_model(folder / "model")
        torch.save(self.trl.optimizer.state_dict(), folder / "optimizer.pt")
        state = {"policy_version": self.policy_version, "rng": self.rng.bit_generator.state}
        (folder / "trainer.json").write_text(json.dumps(state, indent=1))

    def load(self, folder: Path) -> None:
        """Takes up a checkpoint; the settings stay those of this trainer. Raises PolarError if it is torn or of another
        model or adapter, and then changes nothing."""
        checkpoints.check(folder)
        state = json.loads((folder / "trainer.json").read_text())
        optimizer = torch.load(folder / "optimizer.pt", map_location=self.device, weights_only=True)
        self._load_policy(folder)
        self.trl.optimizer.load_state_dict(optimizer)
        for table in self.trl.optimizer.param_groups:
            table["lr"] = self.trl.args.learning_rate
        self.trl.optimizer.param_groups[0]["weight_decay"] = self.trl.args.weight_decay  # the second has none
        self.rng.bit_generator.state = state["rng"]
        self.policy_version = int(state["policy_version"])

    def _load_policy(self, folder: Path) -> None:
        kind = "adapter" if self.adapted else "model"
        if not (folder / kind).is_dir():
            raise PolarError(f"The checkpoint {folder} has no {kind}; go on with or without lora, as it was begun.")
        if self.adapted:
            return adapter.load(self.model, folder / kind)
        weights = load_model(folder / kind).state_dict()
        if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in self.tensors().items()}:
            raise PolarError(f"The checkpoint {folder} is of another model than {self._start}; start from that model.")
        self.model.load_state_dict(weights)
