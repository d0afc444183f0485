"""What a request cost so far, from the worker's cumulative counters.

Rules
- Counters of a worker are cumulative per choice; a charge is the difference to the largest value seen, so that a lost,
  repeated or reordered message bills nothing twice.
- The prompt is counted once, however many choices and attempts: what an earlier attempt computed and a later one
  computes again is recompute, which is neither billed nor charged. The same holds for output tokens.
- The prompt's length is the gateway's own count, until an upstream says its own.
- Output is counted after stop strings were cut (``choices.ChoiceStream``), so tokens past a stop are in no charge.
"""

from __future__ import annotations

from functools import lru_cache

from policies.types import Charge, Usage

_charge = lru_cache(1024)(Charge)
"""Most are a few tokens of output, the same again and again; to make one takes longer than to look it up."""


class Meter:
    """Counts one request over all its choices and attempts."""

    def __init__(self, prompt_tokens: int, choices: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompt = 0
        self._cached = 0
        self._output = [0] * choices

    @property
    def usage(self) -> Usage:
        """Everything counted so far."""
        return Usage(self._prompt, self._cached, sum(self._output))

    def observe(
        self, index: int, prompt_computed: int, prompt_cached: int, output: int, prompt_tokens: int = 0
    ) -> Charge:
        """Take cumulative figures of choice ``index``; returns what is new. Unknown choices count nothing.

        ``prompt_tokens``: the prompt's true length, from an upstream that has counted it; 0: nothing new about it.
        """
        if not 0 <= index < len(self._output):
            return Charge()
        self._prompt_tokens = whole = prompt_tokens or self._prompt_tokens
        prompt = cached = 0
        if self._prompt + self._cached < whole:
            if prompt_cached > self._cached:
                cached = max(0, min(prompt_cached, whole - self._prompt) - self._cached)
                self._cached += cached
            if prompt_computed > self._prompt:
                prompt = max(0, min(prompt_computed, whole - self._cached) - self._prompt)
                self._prompt += prompt
        return _charge(prompt, cached, self.produced(index, output))

    def produced(self, index: int, output: int) -> int:
        """Take a cumulative figure of choice ``index``, whose prompt is settled; how many output tokens are new."""
        new = output - self._output[index]
        if new <= 0:
            return 0
        self._output[index] = output
        return new
