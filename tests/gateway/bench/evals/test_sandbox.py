"""What a model writes runs, and can do nothing but compute."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.bench.evals import landlock, problems, seccomp
from gateway.bench.evals.sandbox import passes

SOLUTIONS = (
    "    return a + b",
    "    return n % 2 == 0",
    "    return max(numbers)",
    "    return text[::-1]",
    "    return sum(letter in 'aeiou' for letter in text)",
    "    import math\n    return math.factorial(n)",
    "    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "    return text == text[::-1]",
    "    return list(dict.fromkeys(items))",
    "    return (fahrenheit - 32) * 5 / 9",
    "    from collections import Counter\n    return dict(Counter(text.split()))",
    "    while b:\n        a, b = b, a % b\n    return a",
)


@pytest.mark.parametrize(("problem", "body"), list(zip(problems.CODE, SOLUTIONS, strict=True)))
def test_every_problem_can_be_solved_and_failed(problem: problems.Problem, body: str) -> None:
    """Its tests let a right function pass and an empty one not; what follows the function is cut off."""
    assert passes(problems.program(problem, f"\n{body}\n\ndef another():\n    raise SystemExit"))
    assert not passes(problems.program(problem, "\n    return None"))


def test_printing_is_harmless() -> None:
    assert passes("for number in range(1000):\n    print('x' * 1000)")


DISGUISED = "import os; Disguised = type('Disguised', (str,), {'__str__': lambda _: os.__file__})"
"""A path that says it was another when somebody asks."""


def test_files_are_out_of_reach(tmp_path: Path) -> None:
    """Neither read nor written, by whatever road."""
    target = tmp_path / "made"
    secret = tmp_path / "secret"
    secret.write_text("key")
    for deed in (
        f"open({str(target)!r}, 'w')",
        f"open({str(secret)!r})",
        f"import os; os.mkdir({str(target)!r})",
        f"import os; os.open({str(target)!r}, os.O_CREAT | os.O_WRONLY)",
        "import os; os.open(os.path.dirname(os.__file__) + '/../made', os.O_CREAT | os.O_WRONLY)",
        f"import os; os.remove({str(secret)!r})",
        "import os; os.listdir('/')",
        f"import pathlib; pathlib.Path({str(target)!r}).write_text('x')",
        f"{DISGUISED}; open(Disguised({str(secret)!r}))",
        f"{DISGUISED}; os.open(Disguised({str(secret)!r}), os.O_RDONLY)",
        f"{DISGUISED}; os.listdir(Disguised('/'))",
        f"{DISGUISED}; import builtins; builtins.str = lambda *_: Disguised.__str__(0); open({str(secret)!r})",
        f"{DISGUISED}; import __main__; __main__.str = lambda *_: Disguised.__str__(0); open({str(secret)!r})",
        f"import io; io.open_code({str(secret)!r})",
        f"import linecache; assert linecache.getlines({str(secret)!r})",
    ):
        assert not passes(deed), deed
    assert not target.exists()
    assert secret.read_text() == "key"


@pytest.mark.parametrize(
    "deed",
    [
        "import socket; socket.socket()",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import ctypes; ctypes.CDLL(None)",
        "import os; os.kill(os.getppid(), 0)",
        "import threading; threading.Thread(target=print).start()",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))",
        "(lambda: 0).__code__.replace(co_code=b'')",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import os; os.write(1, b'not the word'); os._exit(0)",
        "x = bytearray(2**31)",
        "x = 'a' * 10\nwhile True: x += x",
        "def f(): f()\nf()",
        "not python",
        "\x00",
    ],
)
def test_other_deeds_fail(deed: str) -> None:
    assert not passes(deed)


def test_a_loop_ends() -> None:
    """By the clock, before its processor time is used up."""
    assert not passes("while True: pass", wall_s=1.0)


def test_a_flood_of_output_is_not_kept() -> None:
    assert not passes("import os\nwhile True: os.write(1, b'x' * 65536)", wall_s=5.0)


CONFINED = seccomp.program() != b"" and Path("/proc/sys/kernel/seccomp").exists()
"""This machine has a filter, and its kernel takes one."""


@pytest.mark.parametrize(
    "deed",
    [
        "os.mkfifo(target)",
        "os.mknod(target, 0o600 | stat.S_IFREG)",
        "os.chroot('.')",
        "os.setpriority(os.PRIO_PROCESS, 0, 0)",
        "setattr(sys, 'audit', lambda *_: None) or subprocess.run(['/bin/touch', target])",
    ],
)
def test_what_is_no_event_is_refused_by_the_filter(deed: str, tmp_path: Path) -> None:
    """No event to a hook, or one that the library itself tells, and can be kept from telling."""
    target = tmp_path / "made"
    done = passes(f"import os, stat, subprocess, sys; target = {str(target)!r}; {deed}")
    assert not (CONFINED and (done or target.exists()))


DEED = """
import os, resource, signal, socket, time
{filter}
try:
    {deed}
except PermissionError:
    print("refused")
else:
    print("done")
"""
REFUSED = (
    "open('made', 'w')",
    "os.open('made', os.O_CREAT)",
    "os.mkfifo('made')",
    "os.mkdir('made')",
    "os.fork()",
    "socket.socket()",
    "os.kill(os.getpid(), 0)",
    "resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))",
)


@pytest.mark.parametrize("deed", [*REFUSED, "open(os.__file__).read(); os.stat('/'); time.sleep(0)"])
def test_the_kernel_refuses_what_the_hook_does_not_hear(deed: str, tmp_path: Path) -> None:
    """The filter alone, without a hook. Where there is none, everything is done."""
    code = DEED.format(filter=seccomp.installing(), deed=deed)
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, timeout=60)
    refused = CONFINED and deed in REFUSED
    assert said.stdout.split()[-1:] == ([b"refused"] if refused else [b"done"]), said.stderr
    assert not refused or not list(tmp_path.iterdir())


FENCED = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
"""This kernel knows Landlock; the call asks for its version."""
FORBIDDEN = ("open('secret').read()", "open('made', 'w')", "os.mkdir('made')", "os.rename('secret', 'made')")


@pytest.mark.parametrize("deed", [*FORBIDDEN, "open(os.__file__).read(); os.listdir(os.path.dirname(os.__file__))"])
def test_the_kernel_keeps_files_that_native_code_asks_for(deed: str, tmp_path: Path) -> None:
    """The fence alone, without a hook and without the filter."""
    (tmp_path / "secret").write_text("key")
    code = DEED.format(filter=landlock.installing(), deed=deed)
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, timeout=60)
    refused = FENCED and deed in FORBIDDEN
    assert said.stdout.split()[-1:] == ([b"refused"] if refused else [b"done"]), said.stderr
    assert not refused or [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_machine_without_a_table_has_no_filter() -> None:
    assert seccomp.program("abacus") == b""
    for machine in ("x86_64", "aarch64"):
        made = seccomp.program(machine)
        assert bool(made) == (sys.platform == "linux")
        assert len(made) % 8 == 0
