"""A PostgreSQL server that tests may stop, kill and start again: its own cluster in a temporary folder, on a Unix
socket and a free loopback port, with passwords and with fsync. Where the tests run as root it runs as another user,
since PostgreSQL refuses root."""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

USER = "polar"


def programs() -> Path | None:
    """The folder of initdb and postgres: on the PATH, or where Debian puts the newest; None without them."""
    on_path = [Path(found).resolve()] if (found := shutil.which("initdb")) else []
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]), reverse=True)
    folders = (initdb.parent for initdb in [*on_path, *debian])
    return next((f for f in folders if (f / "postgres").is_file() and (f / "pg_isready").is_file()), None)


def _other_user() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class PostgresServer:
    """A context. `url` has the password; with POLAR_TEST_POSTGRES `shared_url` is that server's instead."""

    def __init__(self) -> None:
        bin_folder = programs()
        assert bin_folder is not None
        self.bin = bin_folder
        self.password = secrets.token_hex(12)
        self.folder = Path(tempfile.mkdtemp(prefix="polar-pg-", dir="/tmp"))  # short: a socket's path ends at 107 bytes
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._as: dict[str, Any] = _other_user()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/postgres"

    @property
    def shared_url(self) -> str:
        return os.environ.get("POLAR_TEST_POSTGRES") or self.url

    @property
    def socket_url(self) -> str:
        return f"postgresql://{USER}:{self.password}@/postgres?host={self.folder}&port={self.port}"

    def schema_url(self, schema: str = "") -> str:
        """A store of its own on the shared server."""
        base = self.shared_url
        return f"{base}{'&' if '?' in base else '?'}schema={schema or 't_' + secrets.token_hex(6)}"

    def __enter__(self) -> "PostgresServer":
        try:
            if self._as:
                os.chown(self.folder, self._as["user"], self._as["group"])
            secret = self.folder / "password"
            secret.write_text(self.password)
            secret.chmod(0o644)  # in a folder that only its user can enter
            made = subprocess.run(
                [
                    *(self.bin / "initdb", "-D", self.folder / "data", "-U", USER, "--pwfile", secret),
                    *("--auth=scram-sha-256", "--no-locale", "--encoding=UTF8", "--no-instructions"),
                ],
                capture_output=True,
                text=True,
                cwd=self.folder,
                **self._as,
            )
            assert made.returncode == 0, made.stderr
            self.start()
        except BaseException:
            self.stop()
            shutil.rmtree(self.folder)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(kill=True)  # a shutdown in order would first sync what is deleted next
        shutil.rmtree(self.folder)

    def start(self) -> None:
        if self._process is not None:
            return
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"]
        settings += ["fsync=on", "shared_buffers=16MB", "max_connections=60", "log_min_messages=fatal"]
        flags = [part for setting in settings for part in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.folder / "data", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                **self._as,
            )
        end = time.monotonic() + 60
        ready = [self.bin / "pg_isready", "-q", "-h", self.folder, "-p", str(self.port)]
        while subprocess.run(ready).returncode != 0:
            assert self._process.poll() is None and time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self, *, kill: bool = False) -> None:
        """At once: open connections are cut. kill: as a loss of power would."""
        if self._process is None:
            return
        self._process.send_signal(9 if kill else 2)
        self._process.wait(60)
        self._process = None
        if kill:  # its children see that their parent has died, and only then may another server start on the files
            end = time.monotonic() + 30
            while self._children() and time.monotonic() < end:
                time.sleep(0.05)

    def _children(self) -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if entry.readlink() == self.folder / "data":
                    found.append(entry.parent.name)
            except OSError:
                continue
        return found
