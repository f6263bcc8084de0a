"""polar show: a run's table, or one rollout or served session turn by turn. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from polarlike.commands import tables
from polarlike.commands.train import print_run
from polarlike.records import Call, Message, Rollout, Trajectory, UsageError
from polarlike.rollouts.folder import RunFolder
from polarlike.store import NoRun, Store
from reconstruct import rebuild
from reconstruct.fidelity import page


def open_run(path: Path) -> tuple[RunFolder, Store]:
    """The run at a path, for reading alone: its disk may be read-only. Raises UsageError where there is none."""
    folder = RunFolder(path)
    try:
        if path.is_dir():
            return folder, Store(folder.store_url, read_only=True)
    except NoRun:
        pass
    raise UsageError(f"There is no run at {path}; give the folder that polar collect, train or serve wrote.")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[RunFolder, Store]]:
    folder, store = open_run(path)
    try:
        yield folder, store
    finally:
        store.close_blocking()


def show_run(path: Path, console: Console) -> None:
    with _opened(path) as (folder, store):
        _run(folder, store, console)


def _run(folder: RunFolder, store: Store, console: Console) -> None:
    rollouts = tables.counted(store.rollouts())
    served = [(s, store.calls(s.session_id)) for s in store.sessions() if not s.rollout_id]
    if served:
        console.print(tables.by_session(served))
        return
    if any(m["kind"] == "step" for m in folder.metrics()):
        print_run(folder, console)
        console.print(tables.by_phase(rollouts))
    else:
        console.print(tables.by_task(rollouts))
    for rollout in rollouts[:20]:
        score = _score(rollout)
        console.print(f"{rollout.rollout_id}  {rollout.group_id} #{rollout.sample}  {score}", highlight=False)
    if len(rollouts) > 20:
        console.print(f"... and {len(rollouts) - 20} more")


def show_rollout(path: Path, name: str, console: Console) -> None:
    """`name` is the id of a rollout or a served session, the beginning of one, or a place such as operator-botu:0."""
    with _opened(path) as (_, store):
        _named(path, store, name, console)


def _named(path: Path, store: Store, name: str, console: Console) -> None:
    served = [s for s in store.sessions() if not s.rollout_id and s.session_id.startswith(name)]
    if len(served) == 1:
        _conversation(console, served[0].session_id, store.calls(served[0].session_id))
        return
    found = [r for r in store.rollouts() if name == r.slot or r.rollout_id.startswith(name)]
    found = [r for r in found if r.slot == name][-1:] or found
    if len(found) != 1:
        what = "no rollout" if not found else f"{len(found)} rollouts"
        raise UsageError(f"There is {what} {name!r} in {path}; polar show {path} lists them.")
    rollout = found[0]
    calls = store.calls(rollout.session_id)
    ended = bool(rollout.harness_exit.get("reason"))
    trajectory = rebuild(calls, rollout_id=rollout.rollout_id, task_id=rollout.task_id, harness_ended=ended)
    console.rule(f"{rollout.rollout_id}  {rollout.task_id}  {_score(rollout)}")
    _turns(console, calls, trajectory)
    console.rule("score")
    _print_score(console, rollout)
    _fidelity(console, trajectory)


def _conversation(console: Console, session_id: str, calls: list[Call]) -> None:
    """A served session: nobody told when its agent ended, so its last reply waits for an echo."""
    trajectory = rebuild(calls, rollout_id=session_id, task_id="", harness_ended=False)
    console.rule(session_id)
    _turns(console, calls, trajectory)
    _fidelity(console, trajectory)


def _turns(console: Console, calls: list[Call], trajectory: Trajectory) -> None:
    segment_of = {span.call_id: s.segment_id for s in trajectory.segments for span in s.spans}
    for call in calls:
        for message in call.new_messages:
            _message(console, message)
        _reply(console, call, segment_of.get(call.call_id))


def _fidelity(console: Console, trajectory: Trajectory) -> None:
    console.rule("fidelity")
    console.print(escape(page(trajectory.fidelity)), highlight=False, end="")


def _message(console: Console, message: Message) -> None:
    text = message["content"]
    if len(text) > 1500:
        text = f"{text[:1000]}\n... {len(text) - 1500} characters ...\n{text[-500:]}"
    console.print(f"[bold]{message['role']}[/bold]", highlight=False)
    console.print(escape(text), highlight=False)


def _reply(console: Console, call: Call, segment: str | None) -> None:
    tokens = f"{call.completion_ids.size} tokens"
    if call.versions.size:
        low, high = int(call.versions.min()), int(call.versions.max())
        tokens += f", version {low}" if low == high else f", versions {low} to {high}"
        tokens += f", mean logprob {float(call.logprobs.mean()):.3f}"
    where = f", segment {segment}" if segment else ", in no segment"
    console.print(
        f"[bold green]assistant[/bold green] call {call.index} ({call.cause.value}, {call.delivery.value}, "
        f"{call.finish_reason}, {tokens}{where})",
        highlight=False,
    )
    if call.reply.get("reasoning_content"):
        console.print(f"[dim]{escape(call.reply['reasoning_content'])}[/dim]", highlight=False)
    if call.reply.get("content"):
        console.print(escape(call.reply["content"]), highlight=False)
    for tool_call in call.reply.get("tool_calls", []):
        function = tool_call["function"]
        console.print(escape(f"-> {function['name']} {function['arguments']}"), style="cyan", highlight=False)


def _print_score(console: Console, rollout: Rollout) -> None:
    console.print(_score(rollout), highlight=False)
    if rollout.score:
        for name, value in rollout.score.components.items():
            console.print(f"  {name}: {value:g}", highlight=False)
    exit_record = rollout.harness_exit
    console.print(f"harness: {exit_record.get('reason', 'not run')} {escape(str(exit_record.get('detail', '')))}")
    console.print("seconds: " + ", ".join(f"{k} {v:.2f}" for k, v in rollout.timings.items()), highlight=False)


def _score(rollout: Rollout) -> str:
    if rollout.score is None:
        return "not scored yet"
    if rollout.score.value is None:
        assert rollout.score.unscored is not None
        return f"unscored ({rollout.score.unscored.value}): {escape(rollout.score.reason)}"
    return f"score {rollout.score.value:g}"
