"""Reads the system call filter of a process. Needs root, and a kernel with checkpoint and restore (Debian's has it).

Source: ptrace(2), PTRACE_SECCOMP_GET_FILTER.
"""

from __future__ import annotations

import ctypes
import errno
import os

_SEIZE, _INTERRUPT, _DETACH, _GET_FILTER = 0x4206, 0x4207, 17, 0x420C
_WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


def filters_of(pid: int) -> list[bytes]:
    """The filter programs, oldest first, in the kernel's own form: eight bytes an instruction. The process is stopped
    for less than a millisecond. OSError where it may not be traced."""
    _ptrace(_SEIZE, pid, 0, None)
    try:
        _ptrace(_INTERRUPT, pid, 0, None)
        os.waitpid(pid, _WALL)
        found: list[bytes] = []
        while (program := _filter(pid, len(found))) is not None:
            found.append(program)
        return found
    finally:
        _ptrace(_DETACH, pid, 0, None)


def _filter(pid: int, index: int) -> bytes | None:
    try:
        buffer = ctypes.create_string_buffer(8 * _ptrace(_GET_FILTER, pid, index, None))
        _ptrace(_GET_FILTER, pid, index, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):  # no more of them; none at all
            return None
        raise
    return buffer.raw


def _ptrace(request: int, pid: int, address: int, data: ctypes.Array[ctypes.c_char] | None) -> int:
    result: int = _libc.ptrace(request, pid, address, data)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
