"""What a model writes runs, and can do nothing but compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.bench.evals import problems
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
