"""Shared by all rooms: one tiny random model folder a session."""

from pathlib import Path

import pytest

from polarlike.engines.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 folder with tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_model(folder)
    return folder
