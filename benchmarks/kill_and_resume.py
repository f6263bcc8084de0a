"""Kills a collecting process with SIGKILL at random moments, starts the same command again, and checks what must hold.

After each kill: every reply that the agent had received (read from its own trajectory file in the container it was
running in) is a call in the store. At the end: no place was run again once it was finished, every place is finished,
and no container of the run is left. Needs Docker.

    python benchmarks/kill_and_resume.py --kills 20
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import docker

from polarlike.records import RolloutStatus
from polarlike.rollouts.folder import RunFolder
from polarlike.store import Store

ROOT = Path(__file__).resolve().parent.parent


def command(out: Path, tasks: int, samples: int) -> list[str]:
    """The same each time. The scripted policy takes a second a reply, so that kills fall between replies too."""
    settings = {
        "engine": {
            "spec": "scripted:examples/teacher.py",
            "model": "examples/policy/model",
            "options": {"delay_s": 1.0},
        }
    }
    config = out.parent / "config.yaml"
    config.write_text(json.dumps(settings))
    return [
        *(sys.executable, "-m", "polarlike", "collect", "examples/tasks/train", "--config", str(config)),
        *("--sandbox", "docker", "--samples", str(samples), "--limit", str(tasks), "--concurrency", "4"),
        *("--out", str(out)),
    ]


def received(client: docker.DockerClient, label: str) -> set[str]:
    """Call ids that agents in the run's containers had replies to, from their own trajectory files."""
    found: set[str] = set()
    for container in client.containers.list(filters={"label": f"polarlike.run={label}"}):
        try:
            stream, _ = container.get_archive("/tmp/home/trajectory.json")
        except docker.errors.APIError:  # not written yet, or the box is a verifier's
            continue
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            text = file.read().decode() if file else ""
        try:
            messages = json.loads(text)["messages"]
        except ValueError:  # caught while it was being written
            continue
        for message in messages:
            reply = (message.get("extra") or {}).get("response") or {}
            if isinstance(reply, dict) and str(reply.get("id", "")).startswith("chatcmpl-"):
                found.add(reply["id"].removeprefix("chatcmpl-"))
    return found


def finished(store: Store) -> dict[str, str]:
    return {r.slot: r.rollout_id for r in store.rollouts(RolloutStatus.FINISHED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--longest", type=float, default=40.0, help="latest moment of a kill, seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    client = docker.from_env()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = RunFolder(out)
        known: dict[str, str] = {}
        replies = 0
        for kill in range(options.kills):
            process = subprocess.Popen(
                command(out, options.tasks, options.samples), cwd=ROOT, stdout=subprocess.DEVNULL
            )
            moment = rng.uniform(3, options.longest)
            time.sleep(moment)
            ended = process.poll() is not None
            process.kill()
            process.wait()
            if not (out / "store.db").is_file():
                print(f"kill {kill + 1} at {moment:.1f} s: before the run folder was made")
                continue
            store = Store(run.store_url)
            calls = {c.call_id for r in store.rollouts() for c in store.calls(r.session_id)}
            got = received(client, run.label)
            replies += len(got)
            missing = got - calls
            now = finished(store)
            repeated = [slot for slot, rollout in known.items() if now.get(slot) != rollout]
            boxes = len(client.containers.list(all=True, filters={"label": f"polarlike.run={run.label}"}))
            print(
                f"kill {kill + 1} at {moment:.1f} s: {len(now)} finished, {len(calls)} calls, "
                f"{len(got)} replies seen in {boxes} boxes left by the kill{' (it had ended)' if ended else ''}"
            )
            assert not missing, f"delivered but not in the store: {missing}"
            assert not repeated, f"finished places that changed: {repeated}"
            known = now
        subprocess.run(command(out, options.tasks, options.samples), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        store = Store(run.store_url)
        done = [r.slot for r in store.rollouts(RolloutStatus.FINISHED)]
        now = finished(store)
        left = client.containers.list(all=True, filters={"label": f"polarlike.run={run.label}"})
        assert len(done) == len(set(done)) == options.tasks * options.samples, "a place was run twice or not at all"
        assert all(now[slot] == rollout for slot, rollout in known.items())
        assert not left, f"containers left behind: {left}"
        print(
            f"{options.kills} kills: {replies} received replies all in the store, "
            f"{len(done)} places finished once each, no container left"
        )


if __name__ == "__main__":
    main()
