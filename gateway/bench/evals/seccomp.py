"""A filter of system calls for a process that may compute, read its interpreter's files and say a word. Linux only.

Classic BPF over ``struct seccomp_data`` (seccomp(2)): what is not on the list fails with EPERM, inside whatever
library, and after any trick within the interpreter. Files may be opened for reading only. A call of another
architecture's table ends the process. Once installed it holds for good.
"""

from __future__ import annotations

import os
import platform
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""``BPF_LD | BPF_W | BPF_ABS``, ``BPF_JMP | BPF_JEQ | BPF_K``, the same with ``JGE`` and ``JSET``, ``BPF_RET``."""
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000
_OTHER_TABLE = 0x40000000
"""x86-64 also has the numbers of x32, from here on."""
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    openat: int
    harmless: tuple[int, ...]


_INSTALL = """
def confine(program):
    import ctypes, sys
    system, lines = ctypes.CDLL(None), ctypes.create_string_buffer(program, len(program))
    class Filter(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("lines", ctypes.c_void_p)]
    made = Filter(len(program) // 8, ctypes.addressof(lines))
    if not system.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        system.prctl(22, 2, ctypes.byref(made), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    for name in [name for name in sys.modules if "ctypes" in name]:
        del sys.modules[name]  # a second import asks the hook
confine(bytes.fromhex("{program}"))
"""

# fmt: off
_MACHINES: Mapping[str, _Machine] = {
    "x86_64": _Machine(0xC000003E, 257, (
        0, 1, 3, 4, 5, 6, 8,  # read write close stat fstat lstat lseek
        9, 10, 11, 12, 25, 28,  # mmap mprotect munmap brk mremap madvise
        13, 14, 15, 131,  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
        17, 79, 89, 217, 262, 267, 332,  # pread64 getcwd readlink getdents64 newfstatat readlinkat statx
        24, 35, 96, 202, 219, 228, 229, 230,  # sched_yield nanosleep gettimeofday futex restart_syscall clock_*
        39, 60, 63, 98, 186, 231, 318, 334,  # getpid exit uname getrusage gettid exit_group getrandom rseq
    )),
    "aarch64": _Machine(0xC00000B7, 56, (
        63, 64, 57, 80, 62,
        222, 226, 215, 214, 216, 233,
        134, 135, 139, 132,
        67, 17, 61, 79, 78, 291,
        124, 101, 169, 98, 128, 113, 114, 115,
        172, 93, 160, 165, 178, 94, 278, 293,
    )),
}
# fmt: on


def program(machine: str | None = None) -> bytes:
    """Instructions of the filter for this machine, 8 bytes each; empty where there is no table for it."""
    known = _MACHINES.get(machine or platform.machine()) if sys.platform == "linux" else None
    if known is None:
        return b""
    count = len(known.harmless)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, known.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_TABLE),
        (_RETURN, 0, 0, _KILL),
        # A jump skips so many instructions: to the last one, which allows, or to the one before it, which refuses.
        *((_EQUAL, count - index + 3, 0, number) for index, number in enumerate(known.harmless)),
        (_EQUAL, 0, 2, known.openat),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_ANY_BIT, 0, 1, _CHANGES),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def installing() -> str:
    """Python statements that install the filter in the process that runs them; nothing where there is none."""
    found = program()
    return _INSTALL.format(program=found.hex()) if found else ""
