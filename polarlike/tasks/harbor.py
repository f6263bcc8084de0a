"""Harbor task folders as tasks.

Knows the layout of a folder (task.toml, instruction.md, environment/, tests/, solution/); `harbor_schema` knows the
keys, `dockerfile` what need not be built. Reads files and starts nothing.

What holds: a folder either becomes a task that runs as it states, or a UsageError that names the file and says what to
do. The task's id is the folder's name.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from polarlike.records import Environment, Limits, Task, UsageError
from polarlike.strict import check
from polarlike.tasks.dockerfile import read_dockerfile
from polarlike.tasks.harbor_schema import NOT_ENFORCED, EnvironmentTable, TaskToml, size_mb, unsupported


def is_task_folder(folder: Path) -> bool:
    return (folder / "task.toml").is_file()


def load_harbor(path: Path) -> list[Task]:
    """The task of a task folder, or those of the folders directly in `path`, by name. Raises UsageError."""
    if is_task_folder(path):
        return [load_task_folder(path)]
    if (path / "instruction.md").is_file():
        raise UsageError(f"{path} has an instruction.md and no task.toml; add a task.toml (an empty one will do).")
    children = sorted(child for child in path.iterdir() if child.is_dir())
    for child in children:
        if (child / "instruction.md").is_file() and not is_task_folder(child):
            raise UsageError(
                f"{child} has an instruction.md and no task.toml; add a task.toml or move the folder away."
            )
    found = [child for child in children if is_task_folder(child)]
    if not found:
        raise UsageError(f"There is no task in {path}; {_where_else(children)}")
    return [load_task_folder(child) for child in found]


def _where_else(children: list[Path]) -> str:
    deeper = [child.name for child in children if any(is_task_folder(c) for c in child.iterdir() if c.is_dir())]
    if deeper:
        return f"name one of its folders that hold tasks: {', '.join(deeper)}."
    return "give a folder with a task.toml, or one whose folders have one."


def load_task_folder(folder: Path) -> Task:
    """One Harbor task folder. Raises UsageError."""
    toml = _read_toml(folder / "task.toml")
    for what in unsupported(toml):
        raise UsageError(f"{folder / 'task.toml'}: {what}.")
    instruction = folder / "instruction.md"
    if not instruction.is_file():
        raise UsageError(f"{folder} has no instruction.md; write there what the agent is to do.")
    tests = folder / "tests"
    if not (tests / "test.sh").is_file():
        raise UsageError(f"{folder} has no tests/test.sh; write one that leaves a reward in /logs/verifier/reward.txt.")
    if (tests / "Dockerfile").is_file():
        raise UsageError(
            f"{tests} has a Dockerfile; grading runs in a fresh box of the task's own image, so remove it."
        )
    verifier: dict[str, Any] = {"type": "harbor", "tests": str(tests.resolve())}
    if toml.verifier.env:
        verifier["env"] = toml.verifier.env
    if toml.verifier.network_mode is not None:
        verifier["network"] = toml.verifier.network_mode == "public"
    solution = folder / "solution"
    return Task(
        task_id=folder.resolve().name,
        instruction=instruction.read_text().rstrip(),
        environment=_environment(folder, toml),
        verifier=verifier,
        limits=Limits(
            agent_s=toml.agent.timeout_sec or Limits().agent_s,
            verifier_s=toml.verifier.timeout_sec,
        ),
        solution=str(solution.resolve()) if (solution / "solve.sh").is_file() else None,
        metadata=_metadata(toml),
        path=str(folder.resolve()),
    )


def _read_toml(path: Path) -> TaskToml:
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not TOML: {e}; correct it there.") from None
    return check(TaskToml, table, str(path))


def _environment(folder: Path, toml: TaskToml) -> Environment:
    table = toml.environment
    context = folder / "environment"
    compose = [f.name for f in context.glob("*compose*.y*ml")]
    if compose:
        raise UsageError(f"{context / compose[0]}: a task runs in one box; write a Dockerfile in its place.")
    has_dockerfile = (context / "Dockerfile").is_file()
    if not has_dockerfile and table.docker_image is None:
        raise UsageError(f"{folder} has no environment/Dockerfile; add one, or set docker_image in [environment].")
    built = read_dockerfile(context.resolve()) if has_dockerfile else None
    workdir = table.workdir or (built.workdir if built else None)
    if workdir is None:
        raise UsageError(f"{folder} does not say where the agent works; set workdir in [environment] of task.toml.")
    defaults = Environment()
    environment = Environment(
        workdir=workdir,
        env=dict(table.env),
        memory_mb=_memory(folder, table) or defaults.memory_mb,
        cpus=table.cpus or defaults.cpus,
        network=_network(toml),
    )
    if table.docker_image is not None:
        environment.base_image = table.docker_image
    elif built is not None and built.plain:
        environment.copies = built.copies
        environment.env = built.env | environment.env
    else:
        environment.dockerfile = str(context.resolve())
    return environment


def _network(toml: TaskToml) -> bool:
    """Harbor opens the network where a task says nothing; here a box has none unless the task says so."""
    mode = toml.agent.network_mode or toml.agent.network or toml.environment.network_mode
    return mode == "public" if mode is not None else bool(toml.environment.allow_internet)


def _memory(folder: Path, table: EnvironmentTable) -> int | None:
    if table.memory_mb is not None or table.memory is None:
        return table.memory_mb
    size = size_mb(table.memory)
    if size is None:
        raise UsageError(f"{folder / 'task.toml'}: environment.memory is {table.memory!r}; set memory_mb to a number.")
    return size


def _metadata(toml: TaskToml) -> dict[str, Any]:
    metadata = dict(toml.metadata)
    if toml.task:
        metadata["harbor_name"] = toml.task.name
        metadata["keywords"] = list(toml.task.keywords)
    if toml.solution.env:
        metadata["solution_env"] = dict(toml.solution.env)
    ignored = [key for key in NOT_ENFORCED if key in toml.environment.model_fields_set]
    if ignored:
        metadata["not_enforced"] = ignored
    return metadata
