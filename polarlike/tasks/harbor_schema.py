"""The tables of a Harbor task.toml (schema 1.0 to 1.4) and which of their settings we cannot honour.

Knows keys and values; reads no file. Source: Harbor's task format, https://www.harborframework.com/docs/tasks.

What holds: every key of the schema is accepted, and one that asks for what we cannot do is an error in words: a task
never runs under other conditions than it states, with two exceptions that are listed in `NOT_ENFORCED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from polarlike.strict import Strict

NetworkMode = Literal["no-network", "public", "allowlist"]

NOT_ENFORCED = ("storage_mb", "build_timeout_sec")
"""Keys of [environment] that bound what a machine must offer: kept in the task's metadata, enforced by no sandbox of
ours (Docker limits no disk on overlay2 over ext4)."""


class Author(Strict):
    name: str
    email: str | None = None


class Package(Strict):
    """[task]"""

    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)


class Healthcheck(Strict):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class EnvironmentTable(Strict):
    """[environment]. memory and storage are the old spellings ("2G"), allow_internet that of network_mode."""

    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    storage_mb: int | None = Field(default=None, gt=0)
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = Field(default_factory=list)
    allow_internet: bool | None = None
    healthcheck: Healthcheck | None = None
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list)
    skills_dir: str | None = None


class AgentTable(Strict):
    """[agent]"""

    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None
    network: NetworkMode | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = Field(default_factory=list)


class VerifierTable(Strict):
    """[verifier]"""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = Field(default_factory=list)
    collect: list[dict[str, Any]] = Field(default_factory=list)


class SolutionTable(Strict):
    """[solution]"""

    env: dict[str, str] = Field(default_factory=dict)


class TaskToml(Strict):
    """The whole file. version is the old spelling of schema_version."""

    schema_version: str | None = None
    version: str | None = None
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    environment: EnvironmentTable = Field(default_factory=EnvironmentTable)
    agent: AgentTable = Field(default_factory=AgentTable)
    verifier: VerifierTable = Field(default_factory=VerifierTable)
    solution: SolutionTable = Field(default_factory=SolutionTable)
    source: str | None = None
    steps: list[dict[str, Any]] = Field(default_factory=list)
    multi_step_reward_strategy: str | None = None
    artifacts: list[str | dict[str, Any]] = Field(default_factory=list)


def unsupported(toml: TaskToml) -> Iterator[str]:
    """What the file asks for and we cannot do, each as 'KEY: why and what to do'."""
    env, agent, verifier = toml.environment, toml.agent, toml.verifier
    schema = toml.schema_version or toml.version or "1.4"
    if not re.fullmatch(r"1\.[0-4]", schema):
        yield f"schema_version {schema!r} is not one we know; write it as schema 1.4"
    if toml.steps or toml.multi_step_reward_strategy:
        yield "steps: a task of several steps cannot be run; split it into tasks of one step"
    if toml.artifacts:
        yield "artifacts: only the work folder is carried to the verifier; have the agent leave its results there"
    if env.os != "linux":
        yield f"environment.os is {env.os!r}; only linux can be run"
    if env.gpus or env.gpu_types or env.tpu:
        yield "environment.gpus: boxes have no accelerator; remove gpus, gpu_types and tpu"
    if env.healthcheck:
        yield "environment.healthcheck is not run; start services in the image's own start-up and remove it"
    if env.mcp_servers:
        yield "environment.mcp_servers are not started; remove them"
    if env.skills_dir:
        yield "environment.skills_dir is not given to harnesses; remove it"
    for name, table in (("environment", env), ("agent", agent), ("verifier", verifier)):
        modes = {table.network_mode, table.network if isinstance(table, AgentTable) else None}
        if "allowlist" in modes or table.allowed_hosts:
            yield f"{name}.allowed_hosts: a network is all open or all closed; set network_mode to no-network or public"
    for name, user in (("agent", agent.user), ("verifier", verifier.user)):
        if user not in (None, "root", 0):
            yield f"{name}.user is {user!r}; boxes run as their image's own user, so remove it"
    if verifier.environment:
        yield "verifier.environment: grading runs in a fresh box of the task's own image; remove it"
    if verifier.collect:
        yield "verifier.collect hooks are not run; remove them"
    for name, values in (
        ("environment.env", env.env),
        ("verifier.env", verifier.env),
        ("solution.env", toml.solution.env),
    ):
        for key, value in values.items():
            if "${" in value:
                yield f"{name}.{key} takes a variable of the host ({value}); no box sees those: write the value itself"


def size_mb(text: str) -> int | None:
    """MiB of an old size such as "2G" or "512M"; None where it is no such size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])i?B?\s*", text, re.IGNORECASE)
    if not found:
        return None
    return int(float(found.group(1)) * {"K": 1 / 1024, "M": 1, "G": 1024}[found.group(2).upper()])
