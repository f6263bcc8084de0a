"""A waiter that leaves must not harm the engine that others use."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from polarlike.engines.base import EngineOptions
from polarlike.engines.embedded import create


async def test_a_cancelled_score_leaves_the_engine_serving(tiny_model: Path) -> None:
    engine = create(str(tiny_model), EngineOptions())
    await engine.start()
    try:
        ids = np.arange(5, 105, dtype=np.int32)
        for _ in range(20):
            waiting = asyncio.ensure_future(engine.score(ids, 10, 1.0))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        got = await asyncio.wait_for(engine.score(ids, 10, 1.0), 20)
        assert got.shape == (90,)
    finally:
        await engine.close()
