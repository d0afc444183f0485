"""The small tasks of ``forebay eval``: made from a seed or written down here, so that nothing has to be fetched."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A text to go on with, and how the right answer begins."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to be completed, and statements that only hold if it is right."""

    prompt: str
    tests: str


def arithmetic(count: int, seed: int = 0) -> list[Question]:
    """Sums and differences of numbers up to 50, after four worked ones."""
    rng = random.Random(seed)  # noqa: S311 - exercises

    def one() -> tuple[str, str]:
        left, right = rng.randrange(50), rng.randrange(50)
        if rng.random() < 0.5:
            return f"{left} + {right} =", f" {left + right}"
        return f"{max(left, right)} - {min(left, right)} =", f" {abs(left - right)}"

    worked = "".join(f"{task}{answer}\n" for task, answer in (one() for _ in range(4)))
    return [Question(worked + task, answer) for task, answer in (one() for _ in range(count))]


_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey")
_FILLER = (
    "The road to the mill runs along the river and is dry in summer.",
    "Every morning the baker opens his shop before the first bus comes.",
    "Two chairs stood by the window, and nobody had moved them for years.",
    "In spring the water rises as far as the third step of the stairs.",
    "She wrote the letter twice and then sent neither of the two.",
    "The clock in the hall is slow, which everybody in the house knows.",
)


def retrieval(words: int, depths: tuple[float, ...] = (0.1, 0.5, 0.9), seed: int = 0) -> list[Question]:
    """A number said once, at each depth of a text of about ``words`` words, and asked for at its end.

    After Kamradt, "Needle in a haystack" (2023), with other boxes' numbers as distractors.
    """
    rng = random.Random(seed)  # noqa: S311 - exercises
    questions = []
    for depth in depths:
        colours = rng.sample(_COLOURS, 3)
        codes = [rng.randrange(1000, 10_000) for _ in colours]
        lines = [rng.choice(_FILLER) for _ in range(max(3, words // 12))]
        places = sorted(rng.sample(range(len(lines)), 2))
        for place, colour, code in zip(places, colours[1:], codes[1:], strict=True):
            lines.insert(place, f"The number of the {colour} box is {code}.")
        lines.insert(int(depth * len(lines)), f"The number of the {colours[0]} box is {codes[0]}.")
        text = " ".join(lines)
        questions.append(Question(f"{text} To say it again: the number of the {colours[0]} box is", f" {codes[0]}"))
    return questions


CODE: tuple[Problem, ...] = (
    Problem(
        'def add(a, b):\n    """Return the sum of a and b."""\n',
        "assert add(2, 3) == 5\nassert add(-1, 1) == 0",
    ),
    Problem(
        'def is_even(n):\n    """Return True if n is even, else False."""\n',
        "assert is_even(4) is True\nassert is_even(7) is False\nassert is_even(0) is True",
    ),
    Problem(
        'def largest(numbers):\n    """Return the largest number of a list that is not empty."""\n',
        "assert largest([3, 9, 2]) == 9\nassert largest([-5, -7]) == -5",
    ),
    Problem(
        'def reverse(text):\n    """Return the text backwards."""\n',
        "assert reverse('abc') == 'cba'\nassert reverse('') == ''",
    ),
    Problem(
        'def count_vowels(text):\n    """Return how many of the letters a, e, i, o, u are in the text."""\n',
        "assert count_vowels('banana') == 3\nassert count_vowels('xyz') == 0",
    ),
    Problem(
        'def factorial(n):\n    """Return n! for n >= 0."""\n',
        "assert factorial(0) == 1\nassert factorial(5) == 120",
    ),
    Problem(
        'def fibonacci(n):\n    """Return the n-th Fibonacci number; fibonacci(0) is 0 and fibonacci(1) is 1."""\n',
        "assert [fibonacci(n) for n in range(7)] == [0, 1, 1, 2, 3, 5, 8]",
    ),
    Problem(
        'def is_palindrome(text):\n    """Return True if the text reads the same backwards."""\n',
        "assert is_palindrome('level') is True\nassert is_palindrome('ab') is False",
    ),
    Problem(
        'def unique(items):\n    """Return the items without repetitions, in the order in which they first come."""\n',
        "assert unique([3, 1, 3, 2, 1]) == [3, 1, 2]",
    ),
    Problem(
        'def celsius(fahrenheit):\n    """Convert a temperature from Fahrenheit to Celsius."""\n',
        "assert abs(celsius(212) - 100) < 1e-9\nassert abs(celsius(32)) < 1e-9",
    ),
    Problem(
        'def word_count(text):\n    """Return a dictionary from each word of the text to how often it is in it."""\n',
        "assert word_count('a b a') == {'a': 2, 'b': 1}",
    ),
    Problem(
        'def gcd(a, b):\n    """Return the greatest common divisor of two positive integers."""\n',
        "assert gcd(12, 18) == 6\nassert gcd(7, 5) == 1",
    ),
)
"""Written for this project."""

_WORKED = (
    'def double(n):\n    """Return n times two."""\n    return n * 2\n\n\n'
    'def first(items):\n    """Return the first item of a list."""\n    return items[0]\n\n\n'
)


def asked(problem: Problem) -> str:
    """What the model goes on with: two worked functions, and the head of the one it is to write.

    It ends before the line break: that is part of the body's first token.
    """
    return _WORKED + problem.prompt.rstrip("\n")


_ENDS = ("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n```", "\nassert", "\n\n\n")


def program(problem: Problem, answer: str) -> str:
    """The function with the model's body, cut where another statement begins, and the tests after it."""
    cut = min((at for end in _ENDS if (at := answer.find(end)) >= 0), default=len(answer))
    head = problem.prompt.rstrip("\n")
    return f"{head}{answer[:cut]}\n\n{problem.tests}\n"
