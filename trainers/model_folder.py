"""Hugging Face model folders as trainers read and write them. Knows transformers; no trainer, no optimizer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polarlike.records import UsageError

TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates", "generation_config.json",
)  # fmt: skip
"""What is copied beside the weights, so that an engine can serve a saved folder as it served the first one."""


def check_folder(folder: Path) -> None:
    """Raises UsageError unless it is a model folder."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a Hugging Face model folder (it has no config.json); name one with --model.")


def load_model(folder: Path) -> Any:
    """The causal model of a folder in float32, on the CPU. Raises UsageError where there is none."""
    from transformers import AutoModelForCausalLM

    check_folder(folder)
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def copy_tokenizer(start: Path, folder: Path) -> None:
    """Tokenizer, chat template and generation defaults of the folder that training started from."""
    for pattern in TOKENIZER_FILES:
        for path in start.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, folder / path.name)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws one for every load and save, across the progress display of the command."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
