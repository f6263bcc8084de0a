"""polar doctor: what works on this machine, and the command that mends what does not."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from polarlike import plugins
from polarlike.config import EngineConfig
from polarlike.engines.base import Conversation, Engine, EngineError, GenerateRequest
from polarlike.records import PolarError, Sampling, UsageError, no_ids
from polarlike.rollouts.stage import make_engine
from polarlike.templates import load_template
from sandbox.base import Check

TEMPERATURE = 0.7
"""What an engine is asked to sample at: any but 1 shows whether its logprobs are those of what it sampled."""


def checks(model: Path | None, engine: str | None = None) -> dict[str, list[Check]]:
    """Checks by heading. engine: a spec such as vllm:URL, which is then started and asked for a few tokens."""
    found = {"this machine": _machine()}
    for name in plugins.names("sandboxes"):
        try:
            found[f"sandbox {name}"] = plugins.load("sandboxes", name).checks()
        except UsageError as e:
            found[f"sandbox {name}"] = [Check(name, False, str(e), f"pip install 'polarlike[{name}]'")]
    if model is not None:
        found[f"model {model}"] = _model(model)
    if engine is not None:
        found[f"engine {engine}"] = _engine(engine, model)
    return found


def run(model: Path | None, console: Console, engine: str | None = None) -> bool:
    """Prints the checks; whether rollouts can be run at all (one sandbox that works, and the model and the engine if
    they are named)."""
    found = checks(model, engine)
    for heading, lines in found.items():
        console.print(f"[bold]{heading}[/bold]")
        for check in lines:
            mark = "[green]ok[/green] " if check.ok else "[red]no[/red] "
            console.print(f"  {mark} {check.name}: {check.detail}", highlight=False)
            if not check.ok and check.fix:
                console.print(f"      to mend it: {check.fix}", highlight=False)
    names = {kind: plugins.names(kind) for kind in ("harnesses", "engines", "trainers", "verifiers", "dialects")}
    for kind, registered in names.items():
        console.print(f"{kind}: {', '.join(registered)}", highlight=False)
    boxes = [all(c.ok for c in lines) for heading, lines in found.items() if heading.startswith("sandbox")]
    named = [all(c.ok for c in lines) for heading, lines in found.items() if heading.startswith(("model", "engine"))]
    return any(boxes) and all(named)


def _machine() -> list[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    train = all(find_spec(m) for m in ("torch", "transformers"))
    return [
        Check("Python", sys.version_info >= (3, 11), version, "install Python 3.11 or later"),
        Check("disk", free > 2, f"{free:.1f} GB free here", "free some space: a run needs about 2 GB"),
        Check(
            "training",
            train,
            "torch and transformers are installed" if train else "torch or transformers is missing",
            "pip install 'polarlike[train]'",
        ),
    ]


def _model(folder: Path) -> list[Check]:
    try:
        template = load_template(folder)
    except PolarError as e:
        return [Check("chat template", False, str(e), "name the family with --renderer")]
    probe = [{"role": "user", "content": "one"}]
    prompt = template.render(probe, None)
    said = template.encode_reply(prompt, {"role": "assistant", "content": "two"})
    bridged = template.bridge(prompt, said, [{"role": "user", "content": "three"}], None)
    forged = template.render([{"role": "user", "content": template.decode(prompt)}], None)
    ends = set(template.stop_ids)
    same = sum(i in ends for i in forged.tolist()) == sum(i in ends for i in prompt.tolist())
    return [
        Check("chat template", True, f"renderer {template.name}, {template.vocab_size} tokens"),
        Check("turns continue token for token", bridged is not None, "a further turn extends the sampled one"),
        Check("text cannot forge a turn", same, "control tokens in content are encoded as text"),
    ]


def _engine(spec: str, model: Path | None) -> list[Check]:
    try:
        engine = make_engine(EngineConfig(spec=spec, model=model))
        return asyncio.run(_asked(engine))
    except PolarError as e:
        return [Check("it starts", False, str(e), "see docs/engines.md")]


async def _asked(engine: Engine) -> list[Check]:
    try:
        await engine.start()
        length = f"{engine.model_name}, a context of {engine.context_length} tokens"
        found = [Check("it starts", True, length)]
        if engine.text_only:
            return [*found, Check("tokens", True, "text only: it can collect and evaluate, and not train")]
        return [*found, await _sampled(engine), await _scored(engine)]
    finally:
        await engine.close()


async def _sampled(engine: Engine) -> Check:
    name = f"ids and logprobs at temperature {TEMPERATURE:g}"
    messages = [{"role": "user", "content": "Count to three."}]
    prompt = engine.template.render(messages, None) if engine.template else no_ids()
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=8)
    tokens = 0
    try:
        request = GenerateRequest("doctor", prompt, sampling, conversation=Conversation(messages))
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                tokens += chunk.ids.size
    except EngineError as e:
        return Check(name, False, str(e), "see docs/engines.md")
    return Check(name, True, f"{tokens} tokens, each with the logprob it was sampled at")


async def _scored(engine: Engine) -> Check:
    assert engine.template is not None
    ids = engine.template.render([{"role": "user", "content": "Count to three."}], None)
    try:
        await engine.score(ids, 1, 1.0)
    except EngineError as e:
        return Check("it scores given tokens", False, str(e), "training goes on without proof of what is served")
    return Check("it scores given tokens", True, "so that published weights are proven to be served")
