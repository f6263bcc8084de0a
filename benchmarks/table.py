"""Writes docs/benchmarks.md, and the README's table of the chief figures: runs the gateway and trainer benchmarks on
this machine and makes tables of what they measured.

Every figure in both comes from here; nobody edits them. Reads what the benchmarks write with --json and knows
nothing of how they measure. The peer gateway is installed into a virtual environment of its own, .venv-peer, at pinned
versions. A benchmark of trainers is asked for a list of rows (column to text, number, or median with min and max) and
for notes.

    python -m benchmarks.table
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
START, END = "<!-- benchmarks: written by python -m benchmarks.table -->", "<!-- end of benchmarks -->"
Figure = dict[str, float]


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def grid(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)])


def number(value: float) -> str:
    """Three digits that mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def figure(found: Figure | None) -> str:
    """Median, and least to most."""
    if found is None:
        return "-"
    return f"{number(found['median'])} ({number(found['min'])} to {number(found['max'])})"


# ------------------------------------------------------------ the gateway benchmark


def gateway_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What a row says, and the figure's name."""
    lowest, *_ = concurrencies = sorted(map(int, found["workload"]["sessions"]))
    rows = [(f"calls/s, {c} at once", f"calls_per_s_{c}") for c in concurrencies]
    rows += [(f"calls/s until on disk, {c} at once", f"calls_until_on_disk_per_s_{c}") for c in concurrencies]
    for kind, said in (("first", "first call"), ("continuing", "continuing call")):
        rows += [(f"{said}, {lowest} at once, {q}, ms", f"{kind}_{q}_ms") for q in ("p50", "p95")]
        rows += [(f"added to a {said}, {q}, ms", f"added_{kind}_{q}_ms") for q in ("p50", "p95")]
    return [
        *rows,
        ("CPU of the gateway a call, ms", "cpu_ms_per_call"),
        ("memory at rest, MiB", "memory_at_rest_mib"),
        ("memory a call, sessions open, KiB", "memory_kib_per_call_open"),
        ("memory a call, sessions closed, KiB", "memory_kib_per_call_closed"),
        ("disk a call, bytes", "disk_bytes_per_call"),
    ]


def kept_rows(kept: dict[str, dict[str, int]], names: list[str]) -> list[list[str]]:
    def share(name: str, part: str, whole: str) -> str:
        counts = kept[name]
        return f"{counts[part]} of {counts[whole]}" if part in counts else "-"

    asked = [
        ("prompt ids kept as the engine had them, calls", "prompt_ids", "calls"),
        ("sampled ids kept, calls", "completion_ids", "calls"),
        ("logprobs kept, calls", "logprobs", "calls"),
        ("continuing calls on the exact ids of the turn before", "exact", "continuing"),
        (
            "continuing calls on the exact ids of a turn that no tokenizer would have spelled so",
            "exact_odd",
            "continuing_odd",
        ),
        ("replies that clients held at `kill -9` and that are lost", "lost", "received"),
    ]
    return [[said, *(share(name, part, whole) for name in names)] for said, part, whole in asked]


def gateway_table(found: dict[str, Any]) -> str:
    setups, names = found["setups"], list(found["setups"])
    workload = found["workload"]
    sizes = ", ".join(f"{name} {count:,}" for name, count in workload["prompt_tokens_per_call"].items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rows = [
        [said, *(figure(setups[name].get(key)) for name in names)]
        for said, key in gateway_rows(found)
        if any(key in setups[name] for name in names)
    ]
    return "\n".join(
        [
            f"Conversations of {workload['turns']} turns; prompt tokens a call as the upstream counted them: {sizes}. "
            f"Medians of {workload['repeats']} interleaved repeats (least to most).",
            "",
            grid(["", *names], rows),
            "",
            grid(["kept", *names], kept_rows(found["kept"], names)),
            "",
            *[f"- {note}" for note in found["notes"]],
            "",
            f"{machine.line(found['machine'])}. Versions: {versions}.",
        ]
    )


# ------------------------------------------------------------ the trainer benchmark


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return figure(value)
    return number(value) if isinstance(value, int | float) else str(value)


def trainers_table(found: dict[str, Any]) -> str:
    head = list(dict.fromkeys(name for entry in found["rows"] for name in entry))
    rows = [[cell(entry.get(name, "-")) for name in head] for entry in found["rows"]]
    return "\n".join([grid(head, rows), "", *[f"- {note}" for note in found.get("notes", [])]])


# ------------------------------------------------------------ the page


def peer_python(folder: Path) -> Path:
    """The Python of a virtual environment with the peer gateway, made where it is not there."""
    python = folder / "bin" / "python"
    wanted = Path(__file__).with_name("peer-requirements.txt")
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(wanted)], check=True)
    return python


def measured(module: str, *flags: str) -> dict[str, Any]:
    """What `python -m MODULE --json FILE` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        subprocess.run([sys.executable, "-m", module, *flags, "--json", str(file)], cwd=ROOT, check=True)
        return read(file)


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def page(gateway: dict[str, Any], trainers: dict[str, Any] | None) -> str:
    parts = [
        "# Benchmarks",
        "Written by `python -m benchmarks.table` (`make bench`); run it to have your own machine's figures.",
        "## The proxy between agents and a model server",
        gateway_table(gateway),
    ]
    if trainers is not None:
        parts += ["## Trainers", trainers_table(trainers)]
    return "\n\n".join(parts) + "\n"


def chief_figures(gateway: dict[str, Any], trainers: dict[str, Any] | None) -> str:
    """The README's table: the proxy beside the peer, and our trainer beside TRL's."""
    bare, *names = gateway["setups"]
    busy = sorted(map(int, gateway["workload"]["sessions"]))[:2][-1]
    chosen = {
        f"calls_per_s_{busy}": f"calls/s through it, {busy} at once",
        "added_first_p50_ms": "added to a first call, median, ms",
        "added_continuing_p50_ms": "added to a continuing call, median, ms",
        "cpu_ms_per_call": "CPU a call, ms",
        "disk_bytes_per_call": "disk a call, bytes",
    }
    rows = [[said, *(figure(gateway["setups"][name].get(key)) for name in names)] for key, said in chosen.items()]
    rows += [row for row in kept_rows(gateway["kept"], names) if "`kill -9`" in row[0] or "no tokenizer" in row[0]]
    head = ["before the same model server", *(f"{name} {gateway['versions'].get(name, '')}".strip() for name in names)]
    parts = [grid(head, rows)]
    if trainers is not None:
        parts.append(trainers_table(trainers))
    alone = figure(gateway["setups"][bare].get(f"calls_per_s_{busy}"))
    parts.append(f"{machine.line(gateway['machine'])}. The server alone: {alone} calls/s, {busy} at once.")
    return "\n\n".join(parts)


def between(text: str, table: str) -> str:
    """The text with the table where its two marks are. Raises ValueError where they are not."""
    before, started, rest = text.partition(START)
    _, ended, after = rest.partition(END)
    if not started or not ended:
        raise ValueError(f"the page has no {START} and {END}")
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the benchmarks; write docs/benchmarks.md and the README's table")
    parser.add_argument("--quick", action="store_true", help="a few calls, to see that all of it works")
    parser.add_argument("--gateway", type=Path, help="figures that benchmarks.gateway wrote before, not measured again")
    parser.add_argument("--trainers", type=Path, help="the same of benchmarks.trainers")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--readme", type=Path, default=README, help="the page with the marks for the chief figures")
    options = parser.parse_args()
    quick = ["--quick"] if options.quick else []
    gateway, trainers = gateway_figures(options.gateway, quick), trainer_figures(options.trainers, quick)
    options.out.write_text(page(gateway, trainers))
    options.readme.write_text(between(options.readme.read_text(), chief_figures(gateway, trainers)))


def gateway_figures(before: Path | None, quick: list[str]) -> dict[str, Any]:
    if before is not None:
        return read(before)
    peer = peer_python(ROOT / ".venv-peer")
    return measured("benchmarks.gateway", "--peer", str(peer), *quick)


def trainer_figures(before: Path | None, quick: list[str]) -> dict[str, Any] | None:
    if before is not None:
        return read(before)
    return measured("benchmarks.trainers", *quick) if (ROOT / "benchmarks/trainers.py").is_file() else None


if __name__ == "__main__":
    main()
