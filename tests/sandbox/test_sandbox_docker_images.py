"""Images and toolboxes: built once, named by content, and a Python that needs nothing of the image it runs in."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from sandbox import base_image, certificates, docker_images, docker_toolbox
from sandbox.base import SandboxError, SandboxSpec, ToolboxRecipe
from sandbox.base_image import tag as base_tag
from sandbox.docker_box import DockerProvider
from sandbox.docker_engine import START, engine_errors, sentence
from sandbox.docker_toolbox import BARE_PYTHON


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(tmp_path, f"images-{os.getpid()}")
    client = docker.from_env()
    before = {tag for image in client.images.list() for tag in image.tags}
    yield made
    await made.close()
    for tag in {tag for image in client.images.list() for tag in image.tags} - before:
        if tag.startswith(("polarlike/task:", "polarlike/owned:")):
            client.images.remove(tag, force=True)
    client.close()


def folder(tmp_path: Path, dockerfile: str) -> str:
    place = tmp_path / "context"
    place.mkdir(exist_ok=True)
    (place / "Dockerfile").write_text(dockerfile)
    (place / "note.txt").write_text("hello\n")
    return str(place)


def test_what_makes_the_base_image_runs_under_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's own Python has none of our packages: the command names the one that runs now."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert f"sudo {sys.executable} -m sandbox.base_image" in base_image.cannot_build()


def test_the_command_that_makes_the_base_image_ends_in_one_sentence(tmp_path: Path) -> None:
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    command = [sys.executable, "-m", "sandbox.base_image"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "to mend it: sudo systemctl start docker" in done.stderr


@pytest.mark.docker
async def test_a_dockerfile_is_built_once_and_named_by_its_content(provider: DockerProvider, tmp_path: Path) -> None:
    spec = SandboxSpec(dockerfile=folder(tmp_path, f"FROM {base_tag()}\nCOPY note.txt /srv/\nUSER 1000\n"))
    await provider.prepare(spec)
    box = await provider.start(spec, "built")
    assert await box.read("/srv/note.txt") == b"hello\n"
    assert (await box.run(["id", "-u"], timeout=10)).stdout == b"0\n"
    client = docker.from_env()
    image = client.containers.get(box.box_id).image
    await DockerProvider(tmp_path, "again").prepare(spec)
    assert client.images.get(image.tags[0]).id == image.id
    await box.stop()
    client.close()


@pytest.mark.docker
async def test_a_work_folder_that_an_image_gave_to_another_user_is_usable(
    provider: DockerProvider, tmp_path: Path
) -> None:
    make = "RUN mkdir -p /app/deep && chmod 700 /app/deep && echo x > /app/deep/f && chown -R 1000 /app"
    box = await provider.start(
        SandboxSpec(dockerfile=folder(tmp_path, f"FROM {base_tag()}\n{make}\nUSER 1000\n")), "own"
    )
    assert (await box.run(["sh", "-c", "echo y >> deep/f && cat deep/f"], timeout=10)).stdout == b"x\ny\n"
    status = (await box.run(["cat", "/proc/self/status"], timeout=10)).stdout
    assert b"CapEff:\t0000000000000000" in status
    await box.stop()


@pytest.mark.docker
async def test_a_broken_dockerfile_is_told_by_its_last_lines(provider: DockerProvider, tmp_path: Path) -> None:
    spec = SandboxSpec(dockerfile=folder(tmp_path, f"FROM {base_tag()}\nRUN echo the cause >&2; exit 7\n"))
    with pytest.raises(SandboxError, match=r"could not be built.*the cause"):
        await provider.prepare(spec)


@pytest.mark.docker
async def test_a_folder_without_a_dockerfile_is_refused(provider: DockerProvider, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no Dockerfile"):
        await provider.prepare(SandboxSpec(dockerfile=str(tmp_path)))


@pytest.mark.docker
async def test_an_image_that_is_nowhere_is_told_by_name(provider: DockerProvider) -> None:
    with pytest.raises(SandboxError, match="no image polarlike/no-such-image"):
        await provider.prepare(SandboxSpec(image="polarlike/no-such-image:1"))


@pytest.mark.docker
async def test_a_toolbox_runs_in_an_image_without_python_or_a_c_library(
    provider: DockerProvider, tmp_path: Path
) -> None:
    toolbox = await provider.toolbox(BARE_PYTHON)
    assert toolbox.mount is not None
    assert toolbox.mount.read_only
    gone = (
        "rm -rf /usr/bin/python3* /usr/lib/python3* /usr/lib/x86_64-linux-gnu/libssl* /usr/lib/x86_64-linux-gnu/libz.*"
    )
    spec = SandboxSpec(dockerfile=folder(tmp_path, f"FROM {base_tag()}\nRUN {gone}\n"), mounts=[toolbox.mount])
    box = await provider.start(spec, "bare")
    python = f"{toolbox.root}/bin/python"
    assert (await box.run(["sh", "-c", "command -v python3"], timeout=10)).exit_code == 127
    probe = "import ssl, sqlite3, ctypes, zlib, sys; print(sys.prefix); print(open('/proc/self/maps').read())"
    result = await box.run([python, "-I", "-c", probe], timeout=20)
    prefix, _, maps = result.stdout.decode().partition("\n")
    assert prefix == toolbox.root, result.stderr
    libraries = {line.split()[-1] for line in maps.splitlines() if ".so" in line}
    assert any("libc.so" in path for path in libraries)
    assert {path for path in libraries if not path.startswith(f"{toolbox.root}/")} == set()
    inherited = (
        "import subprocess; print(subprocess.run(['/bin/sh', '-c', 'env'], capture_output=True).stdout.decode())"
    )
    env = (await box.run([python, "-I", "-c", inherited], timeout=20)).stdout.decode()
    assert not [line for line in env.splitlines() if line.startswith(("LD_", "PYTHON"))]
    await box.stop()


@pytest.mark.docker
async def test_a_toolbox_never_compiles_at_run_time(provider: DockerProvider) -> None:
    toolbox = await provider.toolbox(BARE_PYTHON)
    assert toolbox.mount is not None
    box = await provider.start(SandboxSpec(mounts=[toolbox.mount]), "compiled")
    result = await box.run([f"{toolbox.root}/bin/python", "-I", "-v", "-c", "import json, http.client"], timeout=30)
    lines = result.stderr.decode().splitlines()
    assert any("matches" in line and "json/__init__.py" in line for line in lines)
    assert not [line for line in lines if line.startswith("# wrote") or "could not create" in line]
    sources = [line for line in lines if line.startswith("# code object from") and "__pycache__" not in line]
    assert sources == []
    await box.stop()


@pytest.mark.docker
async def test_a_failed_toolbox_leaves_nothing_that_counts_as_whole(
    provider: DockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SandboxError, match="toolbox broken could not be built"):
        await provider.toolbox(ToolboxRecipe("broken", ["not a requirement!"]))
    left = [path.name for path in (tmp_path / "polarlike" / "toolbox").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


@pytest.mark.docker
async def test_a_provider_that_closes_ends_its_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ctrl-C would wait for the build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    provider = DockerProvider(tmp_path, "closes")
    building = asyncio.create_task(provider.toolbox(ToolboxRecipe("slow", [])))
    client = docker.from_env()
    mine = {"label": ["polarlike.toolbox=slow"]}
    for _ in range(600):
        if client.containers.list(filters=mine):
            break
        await asyncio.sleep(0.05)
    started = time.monotonic()
    await provider.close()
    with pytest.raises(SandboxError):
        await building
    assert time.monotonic() - started < 5
    assert client.containers.list(all=True, filters=mine) == []
    assert [path.suffix for path in (tmp_path / "polarlike" / "toolbox").iterdir()] == [".lock"]
    client.close()


@pytest.mark.docker
def test_what_a_killed_build_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    client = docker.from_env()
    labels = {"polarlike.toolbox": "tiny", "polarlike.owner": "another-boot:1:1"}
    client.containers.run(base_tag(), ["sleep", "60"], labels=labels, detach=True)
    key = Path(docker_toolbox.ensure(client, ToolboxRecipe("tiny", [])).mount.host).name  # type: ignore[union-attr]
    assert client.containers.list(all=True, filters={"label": ["polarlike.toolbox=tiny"]}) == []
    place = tmp_path / "polarlike" / "toolbox"
    (place / key).rename(place / f".{key}-torn")
    docker_toolbox.ensure(client, ToolboxRecipe("tiny", []))
    assert sorted(path.name for path in place.iterdir()) == [key, f"{key}.lock"]
    assert {path.lstat().st_uid for path in place.rglob("*")} == {os.getuid()}
    client.close()


@pytest.mark.docker
def test_doctor_finds_the_engine_and_the_image() -> None:
    checks = {check.name: check for check in DockerProvider.checks()}
    assert set(checks) == {"docker engine", "docker sockets", "docker base image", "debootstrap"}
    assert checks["docker engine"].ok


def test_a_missing_engine_is_one_sentence_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (check,) = DockerProvider.checks()
    assert not check.ok
    assert check.fix
    with pytest.raises(SandboxError, match="there is no Docker engine at"):
        DockerProvider(tmp_path, "none")


def test_an_engine_that_went_away_is_one_sentence_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    client = docker.DockerClient(f"unix://{tmp_path}/gone.sock", version="1.41")
    with pytest.raises(engine_errors()) as met:
        client.api.create_container("x")
    told = f"the Docker engine at {tmp_path}/gone.sock does not answer any more; to mend it: {START}"
    assert sentence(met.value) == told
    client.close()


def test_an_engine_on_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    with pytest.raises(SandboxError, match="not a Unix socket"):
        DockerProvider(tmp_path, "none")


def test_certificates_are_laid_into_every_stage_of_a_build() -> None:
    text = docker_images.with_certificate("FROM a AS one\nRUN x\nfrom b\nCOPY --from=one /x /x\n").splitlines()
    places = [index for index, line in enumerate(text) if line.lower().startswith("from ")]
    assert len(places) == 2
    for place in places:
        assert text[place + 1] == f"COPY {docker_images.CERTIFICATE} {certificates.INSIDE}"
        assert f"PIP_CERT={certificates.INSIDE}" in text[place + 2]


def test_a_host_without_extra_certificates_adds_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certificates, "LOCAL", tmp_path / "none")
    assert certificates.bundle() is None


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("debian:bookworm", ("debian", "bookworm")),
        ("debian", ("debian", "latest")),
        ("registry.local:5000/team/image", ("registry.local:5000/team/image", "latest")),
    ],
)
def test_an_image_name_is_split_at_its_tag(image: str, parts: tuple[str, str]) -> None:
    assert docker_images._name_and_tag(image) == parts
