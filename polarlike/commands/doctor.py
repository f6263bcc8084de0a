"""polar doctor: what works on this machine, and the command that mends what does not."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from polarlike import plugins
from polarlike.records import PolarError, UsageError
from polarlike.templates import load_template
from sandbox.base import Check


def checks(model: Path | None) -> dict[str, list[Check]]:
    """Checks by heading."""
    found = {"this machine": _machine()}
    for name in plugins.names("sandboxes"):
        try:
            found[f"sandbox {name}"] = plugins.load("sandboxes", name).checks()
        except UsageError as e:
            found[f"sandbox {name}"] = [Check(name, False, str(e), f"pip install 'polarlike[{name}]'")]
    if model is not None:
        found[f"model {model}"] = _model(model)
    return found


def run(model: Path | None, console: Console) -> bool:
    """Prints the checks; whether rollouts can be run at all (one sandbox that works, and the model if one is named)."""
    found = checks(model)
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
    models = [all(c.ok for c in lines) for heading, lines in found.items() if heading.startswith("model")]
    return any(boxes) and all(models)


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
