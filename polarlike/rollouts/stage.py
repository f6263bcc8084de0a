"""Opens what a run needs from its config, and closes all of it: store, engine, proxy, sandbox provider, harness."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from polarlike import plugins
from polarlike.config import EngineConfig, RunConfig
from polarlike.engines.base import Engine, EngineOptions
from polarlike.proxy.server import Proxy
from polarlike.records import RolloutStatus, UsageError
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.rollout import Stage
from polarlike.store import Store
from sandbox.base import SandboxProvider


def make_engine(
    config: EngineConfig, *, seed: int = 0, log: Path | None = None, temperature: float | None = None
) -> Engine:
    """The engine of a spec such as embedded:DIR. Raises UsageError."""
    kind, _, argument = config.spec.partition(":")
    if not kind or not argument:
        said = f" {config.spec!r} names a kind or a folder alone." if config.spec else ""
        raise UsageError(f"Name an engine with --engine, for example --engine embedded:MODEL_DIR.{said}")
    factory = plugins.load("engines", kind)
    options = EngineOptions(
        log=log,
        model=config.model,
        renderer=config.renderer,
        thinking=config.thinking,
        seed=seed,
        dtype=config.dtype,
        max_batch=config.max_batch,
        temperature=temperature,
        extra=config.options,
    )
    engine: Engine = factory(argument, options)
    return engine


def make_provider(kind: str, state_dir: Path, run_label: str, options: dict[str, Any]) -> SandboxProvider:
    """The provider of that kind, proven to work here. auto: docker where it works, else local. Raises UsageError with
    the command that mends it."""
    if kind == "auto":
        kind = "docker" if not _broken("docker") else "local"
    broken = _broken(kind)
    if broken:
        raise UsageError(f"The {kind} sandbox does not work here: {broken}")
    make = plugins.load("sandboxes", kind)
    known = sorted(set(inspect.signature(make).parameters) - {"state_dir", "run_label"})
    if unknown := sorted(set(options) - set(known)):
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise UsageError(f"The {kind} sandbox has no option {unknown[0]!r}; {has}.")
    provider: SandboxProvider = make(state_dir=state_dir, run_label=run_label, **options)
    return provider


def _broken(kind: str) -> str:
    """Why a kind of sandbox does not work here, and what mends it; empty where it does."""
    first = next((c for c in plugins.load("sandboxes", kind).checks() if not c.ok), None)
    return f"{first.name}: {first.detail}; to mend it: {first.fix}" if first else ""


@asynccontextmanager
async def open_stage(config: RunConfig, folder: RunFolder, *, train: bool = True) -> AsyncIterator[Stage]:
    """Everything started, and what an earlier process of this run left behind cleared away."""
    async with AsyncExitStack() as stack:
        provider = make_provider(config.sandbox.kind, folder.path / "boxes", folder.label, config.sandbox.options)
        stack.push_async_callback(provider.close)
        harness = plugins.load("harnesses", config.harness.name)(config.harness.options)
        proxy = await stack.enter_async_context(open_proxy(config, folder))
        await provider.reap()
        await _interrupt_unfinished(proxy.store)
        stack.push_async_callback(_interrupt_unfinished, proxy.store)
        yield Stage(config, proxy, proxy.store, provider, harness, train=train)


@asynccontextmanager
async def open_proxy(config: RunConfig, folder: RunFolder) -> AsyncIterator[Proxy]:
    """The folder's store, the engine and the proxy between them, started; closed in the other order."""
    dialects = [plugins.load("dialects", name)() for name in plugins.names("dialects")]
    async with AsyncExitStack() as stack:
        store = Store(folder.store_url)
        stack.push_async_callback(store.close)
        log = folder.engine_log if config.engine.log else None
        engine = make_engine(config.engine, seed=_seed(config, store), log=log, temperature=config.sampling.temperature)
        stack.push_async_callback(engine.close)
        await engine.start()
        proxy = Proxy(engine, store, dialects)
        stack.push_async_callback(proxy.close)
        yield proxy


def _seed(config: RunConfig, store: Store) -> int:
    """The engine's, another at each start of a run: the same numbers drawn again would make the rollouts that a resumed
    run still owes copies of those it has."""
    return config.seed + (len(store.sessions()) << 32)


async def _interrupt_unfinished(store: Store) -> None:
    """A rollout that was running when its process ended is run again; its calls stay."""
    for rollout in store.rollouts(status=RolloutStatus.RUNNING):
        rollout.status = RolloutStatus.INTERRUPTED
        await store.put_rollout(rollout)
