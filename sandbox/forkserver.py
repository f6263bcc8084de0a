"""A program that has imported an agent's libraries once and forks a child into a box for each start. Standard library
only. Needs root and Linux.

    python -I -S forkserver.py enter FD TOOLBOX ROOT MODULE...     on the host's Python: builds a root of its own, then
    ROOT/bin/python -I forkserver.py serve FD MODULE...            on the toolbox's, in there

Knows: how a process becomes one of a container's. Does not know: Docker, or what the agent is. It lives in namespaces
of its own: it sees the toolbox (read-only) and /proc, no other file of the host and no network.

FD is a packet socket. Out: `ready`, or a sentence why not. In, for each start: one byte with five descriptors, which
are the child's three streams, a socket of its own, and the request as JSON: pid (the box's first process), mark (text
that its cgroup must hold), argv (a script and its arguments), env (all of it), cwd, seccomp (filter programs, base64).
On the child's socket: `pid N`, then `go` comes in once N is in the box's cgroups, then `exit N`; or `refused REASON`,
and nothing was run.

What holds for a child once the script's first line runs: it differs from a process that the engine started in the box
in its parent, its command line and its age, and in nothing that gives it a right. It is in every namespace and cgroup
of the box, below its root folder, without a capability, unable to gain one, behind the same system call filter, with
three open descriptors, and its environment is the box's and the request's. Until its rights are gone it cannot be
traced, and nothing is loaded or run from the box's files. End of file on FD ends the server; children run on.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NAMESPACES = 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, net, ipc, uts
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
KEYCTL = {"x86_64": 250, "aarch64": 219}
SIGACTION = {"x86_64": 13, "aarch64": 134}
JOINED = ("cgroup", "ipc", "uts", "net", "pid", "mnt")  # the last one takes /proc away
SHARED = ("user", "time")


class Refused(Exception):
    """Why this box's children are not forked; the plain way is still open."""


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ---------------------------------------------------------------- a root of its own


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    check(LIBC.mount(texts[0], texts[1], texts[2], flags, texts[3]), f"mount {target}")


def enter(control: str, toolbox: str, root: str, modules: list[str]) -> None:
    """Leaves the host's files and network, then becomes the server."""
    source = Path(__file__).read_bytes()
    check(LIBC.unshare(NEW_NAMESPACES), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    place = os.open(toolbox, os.O_PATH | os.O_DIRECTORY)  # it may lie below what is covered next
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for folder in ("proc", "dev", root.lstrip("/")):
        Path("/tmp", folder).mkdir(parents=True)
    mount(f"/proc/self/fd/{place}", f"/tmp{root}", None, MS_BIND)
    mount(None, f"/tmp{root}", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    mount("/proc", "/tmp/proc", None, MS_BIND)
    for device in ("null", "urandom"):
        Path("/tmp/dev", device).touch()
        mount(f"/dev/{device}", f"/tmp/dev/{device}", None, MS_BIND)
    Path("/tmp/forkserver.py").write_bytes(source)
    os.close(place)
    os.chdir("/tmp")
    check(LIBC.pivot_root(b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    default_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(int(control), True)
    python = f"{root}/bin/python"
    os.execv(python, [python, "-I", "/forkserver.py", "serve", control, *modules])


def default_signals() -> None:
    """Nothing stays ignored that whoever started this ignores. By the system call itself: the C library, and Python
    with it, leaves out the two signals that it keeps for its threads."""
    number = SIGACTION.get(platform.machine())
    if number is None:
        raise Refused(f"the processor is a {platform.machine()}")
    default = bytes(32)  # the kernel's struct of handler, flags, restorer and mask, all of them none
    for which in range(1, signal.NSIG):
        if which not in (signal.SIGKILL, signal.SIGSTOP):
            check(LIBC.syscall(number, which, default, None, 8), f"signal {which}")


# ---------------------------------------------------------------- serving


def serve(control: socket.socket, modules: list[str]) -> list[str]:
    """Returns in a child only, which by then is the box's: the script and arguments that it is to run."""
    started_with = dict(os.environ)
    own_keyring()
    for module in modules:
        importlib.import_module(module)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise Refused("a library started a thread as it was imported")
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        _, handles, _, _ = socket.recv_fds(control, 1, 5)
        if len(handles) < 5:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return child(handles, started_with)
        for handle in handles:
            os.close(handle)
        reap()


def own_keyring() -> None:
    """Not the session keyring of whoever started this."""
    number = KEYCTL.get(platform.machine())
    if number is None:
        raise Refused(f"the processor is a {platform.machine()}")
    check(LIBC.syscall(number, 1, None), "keyctl")


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def child(handles: list[int], started_with: dict[str, str]) -> list[str]:
    """Goes on in the grandchild, which is a process of the box; the child stays outside and tells how it ended."""
    report = socket.socket(fileno=handles[3])
    try:
        with os.fdopen(handles[4], "rb") as handle:
            request = json.load(handle)
        for number in range(3):
            os.dup2(handles[number], number)
        box = Box(request)
        box.join()
        pid = os.fork()
    except (OSError, Refused) as error:
        report.send(f"refused {error}".encode())
        os._exit(0)
    if pid:
        report.send(f"pid {pid}".encode())
        for number in range(3):
            os.close(number)  # or the end of the streams would not be seen
            os.close(handles[number])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report.send(f"exit {128 - code if code < 0 else code}".encode())
        os._exit(0)
    if report.recv(16) != b"go":
        os._exit(0)
    report.close()
    try:
        box.become(started_with)
    except OSError as error:
        os.write(2, f"the agent could not be started: {error}\n".encode())
        os._exit(126)
    return list(request["argv"])


class Box:
    """The box that a child becomes part of, as its first process shows it."""

    def __init__(self, request: dict) -> None:  # type: ignore[type-arg]
        self._request = request
        check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
        # One handle: a folder of /proc stays that of its process, even when the number is given to another.
        self._proc = os.open(f"/proc/{request['pid']}", os.O_PATH | os.O_DIRECTORY)
        if request["mark"] not in self._read("cgroup").decode():
            raise Refused("the box's first process is not seen from here")
        status = dict(line.split(":\t", 1) for line in self._read("status").decode().splitlines() if ":\t" in line)
        if int(status["CapBnd"], 16) or status["NoNewPrivs"] != "1":
            raise Refused("the box's first process may gain rights")
        if (status["Seccomp"] == "2") != bool(request["seccomp"]):
            raise Refused("the box's system call filter is not the one that was read")
        self._groups = [int(group) for group in status["Groups"].split()]
        self._priority = os.getpriority(os.PRIO_PROCESS, request["pid"])
        self._root = self._identity("root")
        self._confined()

    def _read(self, name: str) -> bytes:
        with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=self._proc), "rb") as handle:
            return handle.read()

    def _identity(self, name: str) -> tuple[int, int]:
        info = os.stat(name, dir_fd=self._proc)
        return info.st_dev, info.st_ino

    def _confined(self) -> None:
        """A security module's label cannot be taken over here."""
        try:
            theirs = self._read("attr/current")
        except OSError:
            return  # no such module
        if theirs != Path("/proc/self/attr/current").read_bytes():
            raise Refused("a security module confines the box")

    def join(self) -> None:
        """Enters the namespaces; the process id's holds for children only."""
        for name in SHARED:
            if self._identity(f"ns/{name}") != namespace(name):
                raise Refused(f"the box has a {name} namespace of its own")
        handles = [os.open(f"ns/{name}", os.O_RDONLY, dir_fd=self._proc) for name in JOINED]
        for name, handle in zip(JOINED, handles, strict=True):
            check(LIBC.setns(handle, 0), f"the {name} namespace")
            os.close(handle)
        info = Path("/").stat()
        if (info.st_dev, info.st_ino) != self._root:
            raise Refused("the box's root is not that of its mounts")

    def become(self, started_with: dict[str, str]) -> None:
        """Gives up all that the box's processes do not have. What the interpreter set as it started stays set."""
        os.closerange(3, 1 << 16)
        os.setsid()
        os.umask(0o022)
        os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        os.chdir(self._request["cwd"])
        own = {name: value for name, value in started_with.items() if name == "LC_CTYPE"}
        os.environ.clear()
        os.environ.update({**own, **self._request["env"]})
        filters = [base64.b64decode(text) for text in self._request["seccomp"]]
        os.setgroups(self._groups)
        drop_capabilities()
        check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        for program in filters:
            install(program)
        # Last: until now no process of the box could trace this one.
        check(LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")


def namespace(name: str) -> tuple[int, int]:
    info = Path(f"/proc/self/ns/{name}").stat()
    return info.st_dev, info.st_ino


def drop_capabilities() -> None:
    """From the bounding and the ambient set too, so that none comes back."""
    last = int(LAST_CAPABILITY)
    for number in range(last + 1):
        check(LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "capabilities")
    check(LIBC.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0), "capabilities")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capabilities")


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install(program: bytes) -> None:
    """A system call filter: instructions of eight bytes, as the kernel takes and gives them."""
    wanted = Program(len(program) // 8, program)
    check(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(wanted), 0, 0), "seccomp")


def main() -> None:
    mode, control, *rest = sys.argv[1:]
    with socket.socket(fileno=int(control)) as ours:
        try:
            if mode == "enter":
                enter(control, rest[0], rest[1], rest[2:])
            argv = serve(ours, rest)
        except (OSError, ImportError, Refused) as error:
            ours.send(f"{type(error).__name__}: {error}".encode())
            return
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap").read_text()
    main()
