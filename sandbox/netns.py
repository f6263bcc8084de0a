"""A listening socket inside another process's network namespace. Needs root and Linux; knows nothing of containers.

A socket belongs to the namespace it was made in, whoever holds it: bound on a box's loopback by us, it is reached by
that box alone and accepted by our ordinary event loop. Nothing has to be installed in the box (see setns(2)).
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading

from sandbox.base import SandboxError

CLONE_NEWNET = 0x40000000


def listen_in(pid: int, port: int) -> socket.socket:
    """A non-blocking socket that listens on 127.0.0.1:port in the namespace of `pid`. SandboxError where that fails."""
    made: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            _enter(pid)
            made.append(socket.create_server(("127.0.0.1", port), backlog=128))
        except OSError as error:
            made.append(error)

    # A thread of its own, ended right after: the namespace belongs to the thread and could not be left again safely.
    thread = threading.Thread(target=enter, name=f"netns-{pid}")
    thread.start()
    thread.join()
    result = made[0]
    if isinstance(result, OSError):
        raise SandboxError(f"no socket could be opened inside the box ({result}); use the docker option reach=socket")
    result.setblocking(False)
    return result


def _enter(pid: int) -> None:
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(handle)
