"""A child process that compiles grammars so that its parent can be sure of them, and kill it when it takes too long.

One JSON object per line on standard input: ``{"directory": …, "grammar": …}``. Two lines per question on standard
output: ``loaded`` when the model's vocabulary is there (that may take a second once, and is nobody's fault), then
``{"error": null}`` or ``{"error": "why not"}``. It ends with its standard input or its parent.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from workers import lifeline
from workers.grammar import GrammarError, Vocabulary

MAX_MEMORY = 2 << 30
"""Bytes of address space; a grammar that needs more ends the child, not the machine."""
MAX_VOCABULARIES = 4


class Checker:
    """Compiles; keeps the vocabularies used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Vocabulary] = OrderedDict()

    def vocabulary(self, directory: str) -> Vocabulary:
        """Of a model directory. Raises OSError, ValueError."""
        if directory not in self._known:
            self._known[directory] = Vocabulary.load(Path(directory))
            if len(self._known) > MAX_VOCABULARIES:
                self._known.popitem(last=False)
        self._known.move_to_end(directory)
        return self._known[directory]


def answer(vocabulary: Vocabulary, grammar: str) -> str | None:
    """Why the grammar cannot be used, or None. The first mask is part of the trial."""
    try:
        vocabulary.compile(grammar).mask()
    except GrammarError as error:
        return str(error) or "it does not compile"
    return None


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    checker = Checker()
    for line in questions:
        question = json.loads(line)
        try:
            vocabulary = checker.vocabulary(question["directory"])
        except (OSError, ValueError) as error:
            reason = str(error) if isinstance(error, GrammarError) else "the model's vocabulary cannot be read"
            _say(answers, b"loaded\n", json.dumps({"error": reason}).encode() + b"\n")
            continue
        _say(answers, b"loaded\n")
        _say(answers, json.dumps({"error": answer(vocabulary, question["grammar"])}).encode() + b"\n")


def _say(answers: BinaryIO, *lines: bytes) -> None:
    answers.writelines(lines)
    answers.flush()


if __name__ == "__main__":
    lifeline.die_with(int(sys.argv[1]), stdin=False)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)
