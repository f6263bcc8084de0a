"""Toolboxes for containers: a harness with its own Python, built once, mounted read-only into any image.

Built inside the base image at the very path where it is mounted, so nothing in it has to move:

    /opt/polar/toolbox/NAME/          a virtual environment: bin/python, bin/<tools>, lib/python3.*/site-packages
    /opt/polar/toolbox/NAME/python/   its Python: program, standard library, and every shared library down to libc

What holds: it needs nothing of the image it is mounted in, not even a C library. Its program names its own loader and
an RPATH, never an environment variable, so what the agent starts is untouched by it. Bytecode is compiled ahead and
unchecked, since a read-only folder could never be refreshed. A build that was killed leaves nothing that counts as
whole: it is made under another name and renamed at the end, by one process at a time; the next build removes it. The
build runs as the user, so all it leaves is the user's to remove.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox import base_image, certificates, owner
from sandbox.base import Mount, SandboxError, Toolbox, ToolboxRecipe
from sandbox.docker_engine import api_error
from sandbox.venv_toolbox import QUICK_START, cache_dir, locked, recipe_key

if TYPE_CHECKING:
    import docker

ROOT = "/opt/polar/toolbox"
BARE_PYTHON = ToolboxRecipe(name="python", pip=[])
SCRIPT = Path(__file__).with_name("build_toolbox.sh")
LABEL_NAME, LABEL_OWNER = "polarlike.toolbox", "polarlike.owner"


def ensure(client: docker.DockerClient, recipe: ToolboxRecipe) -> Toolbox:
    """The toolbox, built if it is not in the cache. SandboxError with the last lines where the build fails."""
    base = base_image.ensure(client)
    place = cache_dir() / "toolbox" / recipe_key(recipe, base, SCRIPT.read_text(), QUICK_START.read_text())
    if not place.exists():
        with locked(place):
            if not place.exists():
                remove_builds(client, of_dead=True)
                for torn in place.parent.glob(f".{place.name}-*"):  # of a process that was killed: we hold the lock
                    shutil.rmtree(torn, ignore_errors=True)
                _build(client, base, recipe, place)
    inside = f"{ROOT}/{recipe.name}"
    return Toolbox(root=inside, mount=Mount(str(place), inside))


def remove_builds(client: docker.DockerClient, *, of_dead: bool) -> None:
    """Ends the builds that killed processes left running, or (of_dead False) those of this process."""
    api: Any = client.api
    for found in api.containers(all=True, filters={"label": [LABEL_NAME]}):
        mark = found["Labels"].get(LABEL_OWNER, "")
        if owner.left_behind(mark) if of_dead else mark == owner.our_mark():
            _remove(api, found["Id"])


def _remove(api: Any, container_id: str) -> None:
    """Removes a container that another process, or a thread of this one, may be removing too."""
    try:
        api.remove_container(container_id, force=True, v=True)
    except api_error() as error:
        if error.status_code not in (404, 409):
            raise


def _build(client: docker.DockerClient, base: str, recipe: ToolboxRecipe, place: Path) -> None:
    building = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    building.chmod(0o755)
    try:
        _run(client, base, recipe, building)
        building.rename(place)
    finally:
        if building.exists():
            shutil.rmtree(building, ignore_errors=True)


def _run(client: docker.DockerClient, base: str, recipe: ToolboxRecipe, building: Path) -> None:
    api: Any = client.api
    inside = f"{ROOT}/{recipe.name}"
    binds = [f"{building}:{inside}:rw", f"{SCRIPT}:/build_toolbox.sh:ro", f"{QUICK_START}:/quick_start.pth:ro"]
    env = {"PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if bundle := certificates.bundle():
        binds.append(f"{bundle}:{certificates.INSIDE}:ro")
        env |= certificates.variables()
    made = api.create_container(
        base,
        command=["/bin/sh", "-e", "/build_toolbox.sh", inside, *recipe.pip],
        user=f"{os.getuid()}:{os.getgid()}",
        environment=env,
        labels={LABEL_NAME: recipe.name, LABEL_OWNER: owner.our_mark()},
        host_config=api.create_host_config(binds=binds, init=True),
    )
    try:
        api.start(made["Id"])
        code = api.wait(made["Id"], timeout=1800)["StatusCode"]
        if code != 0:
            lines = api.logs(made["Id"], tail=5).decode(errors="replace").strip().splitlines()
            raise SandboxError(f"the toolbox {recipe.name} could not be built: {' | '.join(lines)[-800:]}")
    finally:
        _remove(api, made["Id"])
