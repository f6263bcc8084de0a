"""The provider's own base image: Debian bookworm with Python, Git and certificates, made without an image registry.

Made once a machine, as root, by debootstrap and `docker import`, and kept in Docker under a tag that names this
recipe; never made again while the tag is there. `sudo .venv/bin/python -m sandbox.base_image` makes it for users who
may use Docker but are not root.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.base import SandboxError
from sandbox.docker_engine import connect
from sandbox.venv_toolbox import cache_dir, locked

if TYPE_CHECKING:
    import docker

SUITE = "bookworm"
# patchelf and the wheels of python3-venv serve the toolbox build, which runs inside this image.
PACKAGES = ("ca-certificates", "git", "patchelf", "python3", "python3-venv")
ENV = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")
# Agents commit: an identity, and no refusal of folders that another user id made.
GITCONFIG = (
    "[user]\n\tname = agent\n\temail = agent@localhost\n[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n"
)
UNNEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")


def mend() -> str:
    """What makes the image. This Python is named in full: root's own does not have our packages."""
    return f"sudo {sys.executable} -m sandbox.base_image"


def tag() -> str:
    recipe = "\n".join([SUITE, *PACKAGES, *ENV, GITCONFIG, *UNNEEDED])
    return f"polarlike/base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def present(client: docker.DockerClient, image: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound:
        return False
    return True


def ensure(client: docker.DockerClient) -> str:
    """The base image's tag, made if it is not there (about a minute). SandboxError says what to run otherwise."""
    if not present(client, tag()):
        with locked(cache_dir() / "base_image"):
            if not present(client, tag()):
                _build(client)
    return tag()


def cannot_build() -> str:
    """Why the image cannot be made by this process; empty where it can."""
    if os.geteuid() != 0:
        return f"the base image is not there and only root can make it; run '{mend()}' once"
    if debootstrap() is None:
        return "the base image is not there and debootstrap is not installed; run 'apt-get install debootstrap'"
    return ""


def debootstrap() -> str | None:
    """Where the program is. A user's PATH often lacks the folder it lives in."""
    return shutil.which("debootstrap") or shutil.which("debootstrap", path="/usr/sbin:/sbin")


def _build(client: docker.DockerClient) -> None:
    if reason := cannot_build():
        raise SandboxError(reason)
    with tempfile.TemporaryDirectory(prefix="polarlike-base-") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        _debootstrap(root)
        for path in UNNEEDED:
            for found in (root / path).glob("*"):
                shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()
        (root / "etc" / "gitconfig").write_text(GITCONFIG)
        (root / "etc" / "resolv.conf").write_text("")
        subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-cf", str(archive), "."], check=True)
        _import(client, archive)


def _debootstrap(root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise SandboxError(f"debootstrap failed ({' '.join(last)}); run '{' '.join(command)}' to see why")


def _import(client: docker.DockerClient, archive: Path) -> None:
    name, _, version = tag().partition(":")
    api: Any = client.api
    changes = [*(f"ENV {value}" for value in ENV), 'CMD ["/bin/sh"]']
    api.import_image(src=str(archive), repository=name, tag=version, changes=changes)
    if not present(client, tag()):
        raise SandboxError("Docker did not take the base image; look at the engine's log and at its free disk space")


def main() -> None:
    try:
        print(ensure(connect()))
    except SandboxError as error:
        sys.exit(f"sandbox.base_image: {error}")


if __name__ == "__main__":
    main()
