"""Which files a process may read, kept by the kernel (landlock(7)). Linux 5.13 or newer.

A filter of system calls cannot follow a path, and an audit hook hears of no file that native code opens. From here on
the process, root's too, opens what lies in its interpreter's library and the system's shared libraries, and
nothing else; nor does it write, make, rename or remove any file. Once installed it holds for good.
"""

from __future__ import annotations

import sys

READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
"""Where the loader finds what the library's modules are linked with, beside the interpreter's own folder."""

_INSTALL = """
def fence(readable):
    import ctypes, os, sys
    system = ctypes.CDLL(None)
    def call(number, *numbers):
        return system.syscall(ctypes.c_long(number), *map(ctypes.c_long, numbers))
    every = ctypes.create_string_buffer((0x1FFF).to_bytes(8, sys.byteorder), 8)  # rights that the first version knows
    rules = call(444, ctypes.addressof(every), 8, 0)  # landlock_create_ruleset
    if rules < 0:
        return  # an older kernel, or one built without
    for path in readable:
        try:
            place = os.open(path, os.O_PATH)
        except OSError:
            continue
        rights = 0xC if os.path.isdir(path) else 0x4  # READ_FILE, READ_DIR
        packed = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        rule = ctypes.create_string_buffer(packed, 12)
        call(445, rules, 1, ctypes.addressof(rule), 0)  # landlock_add_rule, LANDLOCK_RULE_PATH_BENEATH
        os.close(place)
    if not system.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        call(446, rules, 0)  # landlock_restrict_self
    os.close(rules)
    for name in [name for name in sys.modules if "ctypes" in name]:
        del sys.modules[name]
import os, sys
fence((os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *READABLE))
"""


def installing() -> str:
    """Python statements that fence the process in that runs them; nothing where there is no Landlock."""
    return _INSTALL.replace("*READABLE", f"*{READABLE!r}") if sys.platform == "linux" else ""
