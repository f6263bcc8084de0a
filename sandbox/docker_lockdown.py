"""What a container may do: the settings it is created with.

What holds: no network but loopback unless the task says so, no capabilities, no new privileges, the engine's own system
call filter, bounded memory (no swap), processes and cores. Commands run as root without any capability, so a file owned
by another id would be shut to them: all that is put in belongs to root. Disk is not bounded (Docker's overlay on ext4
cannot).

Process 1 is a shell that only reaps. kill(-1) inside does not reach it, so one race-free call ends everything else and
leaves the container alive; Docker's own init would end with its child.
"""

from __future__ import annotations

from typing import Any

from sandbox import certificates
from sandbox.base import Mount, SandboxSpec

KEEP_ALIVE = ["/bin/sh", "-c", "while :; do sleep 2147483647 & wait; done"]


def settings(api: Any, spec: SandboxSpec, more_mounts: list[Mount]) -> dict[str, Any]:
    """Arguments of the SDK's `create_container`. The host name is the same in every box: prompts may show it."""
    return {
        "entrypoint": KEEP_ALIVE[:1],
        "command": KEEP_ALIVE[1:],
        "user": "0:0",
        "hostname": "box",
        "working_dir": spec.workdir,
        "environment": environment(spec),
        "host_config": _host(api, spec, more_mounts),
    }


def environment(spec: SandboxSpec) -> dict[str, str]:
    """What every command of the box finds; the task's own variables win."""
    return {
        "POLAR_WORKDIR": spec.workdir,
        "POLAR_TESTS": "/tests",
        "POLAR_LOGS": "/logs",
        # A pip setting that an image was built with may name folders of the machine that built it.
        "PIP_CONFIG_FILE": "/dev/null",
        **(certificates.variables() if _with_certificates(spec) else {}),
        **spec.env,
    }


def _with_certificates(spec: SandboxSpec) -> bool:
    return spec.network and certificates.bundle() is not None


def _host(api: Any, spec: SandboxSpec, more_mounts: list[Mount]) -> Any:
    mounts = [*spec.mounts, *more_mounts]
    if _with_certificates(spec):
        mounts.append(Mount(str(certificates.bundle()), certificates.INSIDE))
    return api.create_host_config(
        network_mode="bridge" if spec.network else "none",
        mem_limit=f"{spec.memory_mb}m",
        memswap_limit=f"{spec.memory_mb}m",
        nano_cpus=int(spec.cpus * 1e9),
        pids_limit=spec.pids,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        binds=_binds(mounts),
        log_config={"type": "none"},
    )


def _binds(mounts: list[Mount]) -> list[str]:
    """Each once: a harness may have the very toolbox that the way of its socket brings along."""
    return list(dict.fromkeys(f"{m.host}:{m.path}:{'ro' if m.read_only else 'rw'}" for m in mounts))
