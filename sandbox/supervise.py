"""A small program that runs one command and can end everything it started. Run as: python supervise.py FD COMMAND...

Knows: Linux processes. Does not know: boxes, limits, or our other modules (it starts with `-I -S` in a few
milliseconds, so it imports the standard library only).

FD is one end of a socket pair. The exit code goes out on it as a decimal line; any byte or an end of file coming in
means: kill all. As a child subreaper it becomes the parent of every orphan below it, so a child that forked twice,
started its own session or cleaned its environment is still found. After the command has ended it stays while
something below it lives. The end of file is what a killed owner leaves, so nothing outlives `kill -9` of the owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def children() -> list[int]:
    """Direct children of this process, orphans we inherited included."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            stat = (process / "stat").read_bytes()
        except OSError:
            continue
        # The command name may hold blanks and brackets: fields are counted from its last closing bracket.
        if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
            found.append(int(process.name))
    return found


def exit_code(status: int) -> int:
    """The shell's convention: 128 plus the signal for a killed process."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


class Supervisor:
    def __init__(self, control: socket.socket, command: list[str]) -> None:
        self.control = control
        self.main = self._start(command)
        self.alive = True

    def _start(self, command: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(126 if isinstance(error, PermissionError) else 127)

    def reap(self) -> None:
        """Collects ended children; clears `alive` when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alive = False
                return
            if pid == 0:
                return
            if pid == self.main:
                self.report(exit_code(status))

    def report(self, code: int) -> None:
        try:
            self.control.sendall(f"{code}\n".encode())
        except OSError:
            return  # the owner is gone; its end of file makes us kill all

    def kill_all(self) -> None:
        """From the top down: the children of a killed process become ours and go in the next round."""
        while self.alive:
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            self.reap()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    supervisor = Supervisor(control, sys.argv[2:])
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silent, stream)  # or the owner would never see the end of the command's output
    while True:
        supervisor.reap()
        if not supervisor.alive:
            return
        ready, _, _ = select.select([control.fileno(), wake], [], [])
        if control.fileno() in ready:
            supervisor.kill_all()
            return
        os.read(wake, 4096)


if __name__ == "__main__":
    main()
