"""Runs code that a model wrote, against a problem's tests, in a child process that may compute and nothing else.

Rules
- The child is a fresh isolated interpreter without environment, site packages or a folder of its own files. Before the
  code runs it lowers its limits (processor time, memory, files), installs on Linux a fence around the files that it may
  read (``landlock.py``) and a filter of system calls (``seccomp.py``), and an audit hook (PEP 578). None of the four
  can be taken back.
- The hook ends the child at the first event that is not on the short list of harmless ones: files, sockets, processes,
  ctypes, bytecode. What it looks names up in is out of the code's reach, and it trusts a path that is a plain string
  only: of any other object it cannot tell which file is meant.
- Not all that a process can do is an event (``os.mkfifo``, ``_posixsubprocess.fork_exec``), and native code asks no
  hook: fence and filter then refuse what reads other files, writes, starts, signals, connects or changes a limit.
- It has ``WALL_S`` seconds, then it is killed. At most ``MOST_OUTPUT`` bytes are read of it.
- It passed if it wrote the word that it was given for the case that the tests ran to their end.

Where neither is to be had (not Linux; for the filter another processor, for the fence an old kernel), the hook alone
holds back what a model does by mistake, and is no boundary against an attacker who knows the interpreter. Code can also
find the word in its own process and claim to be right: that is cheating, not escaping.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
import threading

from gateway.bench.evals import landlock, seccomp

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
{fence}
{filter}
harmless = frozenset(("import", "compile", "exec", "marshal.loads", "sys._getframe", "builtins.id"))
def watch(event, arguments, *, harmless=harmless, library=library, end=end, kind=type, text=str):
    if event in harmless:
        return
    if event in ("open", "os.listdir"):
        path = arguments[0]
        if kind(path) is text and path.startswith(library) and ".." not in path:
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
    boot = _BOOT.format(cpu=CPU_S, memory=MEMORY, fence=landlock.installing(), filter=seccomp.installing())
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
