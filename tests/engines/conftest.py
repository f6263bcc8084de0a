"""Tiny models for the engines' tests, built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polarlike.engines.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=2048)


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads over two key heads."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "grouped", heads=4, kv_heads=2, head_dim=16, seed=3)


@pytest.fixture
def random_ids() -> Callable[[int], np.ndarray]:
    generator = np.random.default_rng(0)
    return lambda n: generator.integers(0, 300, n).astype(np.int32)
