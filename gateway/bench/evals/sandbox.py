"""Runs code that a model wrote, against a problem's tests, in a child process that may compute and nothing else.

Rules
- The child is a fresh isolated interpreter without environment, site packages or a folder of its own files. It lowers
  its limits (processor time, memory, files) and installs an audit hook (PEP 578) before the code runs; a hook cannot be
  taken back. What is not on the short list of harmless events ends the child: files, sockets, processes, ctypes,
  bytecode.
- It has ``WALL_S`` seconds, then it is killed. At most ``MOST_OUTPUT`` bytes are read of it.
- It passed if it wrote the word that it was given for the case that the tests ran to their end.

This holds back what a model writes by mistake. It is no boundary against an attacker who knows the interpreter; run
foreign models' code on a machine that may be lost.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
import threading

WALL_S = 10.0
CPU_S = 5
MEMORY = 2**30
MOST_OUTPUT = 4096

_BOOT = """
import collections, functools, io, itertools, math, os, re, resource, string, sys
word, code = sys.stdin.readline().strip(), sys.stdin.read()
for name, most in (("CPU", {cpu}), ("AS", {memory}), ("FSIZE", 0), ("NOFILE", 16), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
library, end, say = os.path.dirname(os.__file__) + os.sep, os._exit, os.write
harmless = frozenset(("import", "compile", "exec", "marshal.loads", "sys._getframe", "builtins.id"))
def watch(event, arguments, *, harmless=harmless, library=library, end=end):
    if event in harmless:
        return
    if event in ("open", "os.listdir") and str(arguments[0]).startswith(library) and ".." not in str(arguments[0]):
        if event == "os.listdir" or arguments[1] in ("r", "rb", None) and not (arguments[2] or 0) & 3:
            return
    end(77)
sys.addaudithook(watch)
def run(code, word, say):
    sys.stdout = io.StringIO()
    exec(compile(code, "answer", "exec"), {{"__name__": "answer"}})
    say(1, word.encode())
    end(0)
run(code, word, say)
"""


def passes(code: str, wall_s: float = WALL_S) -> bool:
    """Whether ``code`` runs to its end without an error, a forbidden deed or too much of anything."""
    word = secrets.token_hex(16)
    boot = _BOOT.format(cpu=CPU_S, memory=MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, isolated
            [sys.executable, "-I", "-S", "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        timer = threading.Timer(wall_s, process.kill)
        timer.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            try:
                process.stdin.write(f"{word}\n{code}".encode("utf-8", "replace"))
                process.stdin.close()
            except BrokenPipeError:
                return False
            said = process.stdout.read(MOST_OUTPUT)
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
    return said.endswith(word.encode())
