"""Judges the work tree of an example task and writes reward.json. Copied into each task as tests/check.py.

Plain Python, nothing to install. Reads case.json beside it. The reward is 1 for the right edit and the right word in
done.txt together, else 0; the parts are reported beside it. Where the file is gone or broken no part counts.
Code of the agent runs in a child that cannot write files, before the reward is written.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
WORK = Path(os.environ.get("POLAR_WORKDIR", "/app"))
LOGS = Path(os.environ.get("POLAR_LOGS", "/logs"))
PARTS = ("word", "edited", "right")
PROBES = [(17, 5), (40, 7), (9, 4), (23, 10), (6, 6), (100, 3)]
OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}
CHILD = """
import json, sys
source, names, probes = json.load(sys.stdin)
space = {"__name__": "module"}
exec(compile(source, "module", "exec"), space)
print(json.dumps({n: [space[n](*p) for p in probes] for n in names if callable(space.get(n))}))
"""


def limit_child():
    """No file written, and two seconds of processor time: waiting for a busy machine is no fault of the agent's."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))


def call(source, names, probes):
    """What the named functions of a module return for each probe; a name it lacks is left out. None if it breaks."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd=TESTS,
        preexec_fn=limit_child,
        start_new_session=True,
    )
    child.stdin.write(json.dumps([source, names, probes]).encode())
    child.stdin.close()
    said = read_some(child.stdout.fileno())
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    try:
        results = json.loads(said.splitlines()[-1])  # before it, the module may have printed what it likes
    except (ValueError, IndexError, RecursionError):
        return None
    return results if isinstance(results, dict) else None


def read_some(handle, most=65536, seconds=30):
    """What comes until the end, but no more than `most` bytes and no longer than `seconds`: a flood or a child that
    never closes must end in a verdict."""
    said, end = b"", time.monotonic() + seconds
    while len(said) < most and select.select([handle], [], [], max(0, end - time.monotonic()))[0]:
        more = os.read(handle, most)
        if not more:
            break
        said += more
    return said


def text_of(path):
    """None where there is no such file, or none that can be read."""
    try:
        return path.read_text(errors="replace") if path.is_file() else None
    except OSError:
        return None


def judge_operator(case, source):
    """Edited: the function now computes another of the five operators. Right: it computes the one asked for."""
    results = call(source, [case["function"]], PROBES)
    if not results:
        return None
    got = results.get(case["function"])
    computes = [o for o, f in OPERATORS.items() if got == [f(a, b) for a, b in PROBES]]
    return {"edited": bool(computes) and computes != [case["wrong"]], "right": computes == [case["right"]]}


def judge_line(case, text):
    """Edited: the line is there. Right: it is the last, and the rest is as it was."""
    lines, before = text.splitlines(), case["before"].splitlines()
    if [line for line in lines if line in before] != before:
        return None
    return {"edited": case["line"] in lines, "right": lines == [*before, case["line"]]}


def judge_rename(case, source):
    """Edited: the new name is there and computes the same. Right: the old name is gone."""
    probes = [(a,) for a, _ in PROBES]
    results = call(source, [case["old"], case["new"]], probes)
    if not results:
        return None
    edited = results.get(case["new"]) == [a * case["factor"] for (a,) in probes]
    return {"edited": edited, "right": edited and case["old"] not in results}


def judge(case):
    text = text_of(WORK / case["file"])
    judges = {"operator": judge_operator, "line": judge_line, "rename": judge_rename}
    found = judges[case["kind"]](case, text) if text is not None else None
    if found is None:
        return dict.fromkeys(PARTS, False)
    note = text_of(WORK / "done.txt")
    return {"word": note is not None and note.split() == [case["word"]], **found}


def main():
    found = judge(json.loads((TESTS / "case.json").read_text()))
    reward = float(all(found[part] for part in PARTS))
    out = LOGS / "verifier"
    out.mkdir(parents=True, exist_ok=True)
    (out / "reward.json").write_text(json.dumps({"reward": reward, **{k: float(v) for k, v in found.items()}}))


if __name__ == "__main__":
    main()
