"""A model that runs in milliseconds, built once."""

from pathlib import Path

import pytest

from polarlike.engines.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two query heads on one key-value head."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", kv_heads=1)
