"""Images a box can start from: the base image, a named one, or a folder with a Dockerfile.

A folder is built with the engine's classic builder (the only one it always has) under a tag that names its contents, so
the same folder is built once. The host's extra certificates go into the build where there are any: pip or npm in it
could not reach a registry otherwise.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import tarfile
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sandbox import base_image, certificates, tree
from sandbox.base import Check, SandboxError
from sandbox.docker_engine import NoEngine, connect
from sandbox.venv_toolbox import cache_dir, locked

if TYPE_CHECKING:
    import docker

CERTIFICATE = ".polarlike-ca.crt"
FROM = re.compile(r"^\s*FROM\s", re.IGNORECASE)


def ensure(client: docker.DockerClient, image: str | None, dockerfile: str | None, workdir: str) -> str:
    """The tag to start a box from, built or pulled if it is not there. SandboxError says what could not be had."""
    if dockerfile:
        return _owned(client, _built(client, Path(dockerfile)), workdir)
    if image is None:
        return base_image.ensure(client)
    if not base_image.present(client, image):
        _pull(client, image)
    return _owned(client, image, workdir)


def _owned(client: docker.DockerClient, image: str, workdir: str) -> str:
    """The image with its work folder in root's hands. An image that has a user of its own gave it to that user, and
    root without capabilities could not write there. A container cannot mend that itself: it may not chown either."""
    name = hashlib.sha256(f"{client.images.get(image).id}|{workdir}".encode()).hexdigest()[:16]
    tag = f"polarlike/owned:{name}"
    if not base_image.present(client, tag):
        folder = shlex.quote(workdir)
        give = f"[ ! -e {folder} ] || find {folder} ! -user 0 -exec chown -h 0:0 {{}} +"
        with tempfile.TemporaryFile() as context:
            with tarfile.open(fileobj=context, mode="w") as archive:
                _add(archive, "Dockerfile", f"FROM {image}\nUSER 0:0\nRUN {give}\n".encode())
            context.seek(0)
            _build(client, context, tag, f"the image {image}")
    return tag


def _pull(client: docker.DockerClient, image: str) -> None:
    from docker import errors

    try:
        client.images.pull(*_name_and_tag(image))
    except errors.APIError as error:
        raise SandboxError(f"there is no image {image} and it could not be pulled ({error.explanation})") from error


def _name_and_tag(image: str) -> tuple[str, str]:
    """A tag is what follows the last colon, unless that colon belongs to a registry's port."""
    name, colon, version = image.rpartition(":")
    return (name, version) if colon and "/" not in version else (image, "latest")


def _built(client: docker.DockerClient, folder: Path) -> str:
    if not (folder / "Dockerfile").is_file():
        raise SandboxError(f"there is no Dockerfile in {folder}; name a folder that holds one")
    lines = (folder / "Dockerfile").read_text().splitlines()
    if any(FROM.match(line) and "polarlike/base" in line for line in lines):
        base_image.ensure(client)
    tag = f"polarlike/task:{_digest(folder)}"
    if not base_image.present(client, tag):
        with locked(cache_dir() / "build"), tempfile.TemporaryFile() as context:
            if not base_image.present(client, tag):
                _write_context(folder, context)
                _build(client, context, tag, f"the Dockerfile in {folder}")
    return tag


def _digest(folder: Path) -> str:
    """Names a folder's contents, modes and links, and the certificates that go in."""
    digest = hashlib.sha256()
    for path, stamp in sorted(tree.manifest_of(tree.walk_folder(folder)).items()):
        digest.update(os.fsencode(path) + b"\0" + stamp.kind.encode() + oct(stamp.mode).encode() + stamp.digest)
    if bundle := certificates.bundle():
        digest.update(bundle.read_bytes())
    return digest.hexdigest()[:16]


def _build(client: docker.DockerClient, context: IO[bytes], tag: str, what: str) -> None:
    api: Any = client.api
    log: list[str] = []
    for line in api.build(fileobj=context, custom_context=True, tag=tag, rm=True, forcerm=True, decode=True):
        log.append(line.get("stream") or line.get("error") or "")
        if "error" in line:
            raise SandboxError(f"{what} could not be built: {_tail(log)}")


def _tail(log: list[str]) -> str:
    lines = [line for line in "".join(log).splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


def _write_context(folder: Path, context: IO[bytes]) -> None:
    """The folder as a tar that the builder takes, with the certificates laid into every stage where there are any."""
    bundle = certificates.bundle()
    with tarfile.open(fileobj=context, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in sorted(folder.iterdir()):
            if item.name != "Dockerfile":
                archive.add(item, item.name)
        text = (folder / "Dockerfile").read_text()
        if bundle:
            _add(archive, CERTIFICATE, bundle.read_bytes())
            text = with_certificate(text)
        _add(archive, "Dockerfile", text.encode())
    context.seek(0)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def with_certificate(dockerfile: str) -> str:
    """The Dockerfile with the bundle copied in, and named to the usual tools, after every FROM.

    PIP_CONFIG_FILE is set for the build alone (ARG), as `docker_box` sets it for boxes."""
    values = " ".join(f"{name}={value}" for name, value in certificates.variables().items())
    added = [f"COPY {CERTIFICATE} {certificates.INSIDE}", f"ENV {values}", "ARG PIP_CONFIG_FILE=/dev/null"]
    lines: list[str] = []
    for line in dockerfile.splitlines():
        lines += [line, *added] if FROM.match(line) else [line]
    return "\n".join(lines) + "\n"


def checks() -> list[Check]:
    """For `polar doctor`: the engine, the way sockets get into boxes, the base image and what makes it."""
    try:
        client = connect()
    except NoEngine as error:
        return [Check("docker engine", False, error.problem, error.mend)]
    try:
        version = client.version()["Version"]
        there = base_image.present(client, base_image.tag())
    finally:
        client.close()
    root = os.geteuid() == 0
    reach = "in the box's network namespace (we are root)" if root else "by a Unix socket and a forwarder (not root)"
    problem = "" if there else base_image.cannot_build()
    state = "present" if there else problem or "not there yet; the first run makes it in about a minute"
    return [
        Check("docker engine", True, f"version {version}"),
        Check("docker sockets", True, f"model sockets are placed {reach}"),
        Check("docker base image", not problem, f"{base_image.tag()}: {state}", base_image.mend() if problem else ""),
        _debootstrap(needed=not there),
    ]


def _debootstrap(needed: bool) -> Check:
    there = base_image.debootstrap() is not None
    detail = "present" if there else "not installed" if needed else "not installed, and not needed: the image is there"
    return Check("debootstrap", there or not needed, detail, "" if there else "sudo apt-get install debootstrap")
