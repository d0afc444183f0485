"""A loaded model that is asked things: how surprised it is by a text, and how it goes on with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.bench.report import BenchError

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.model.loading import LoadedModel
    from workers.protocol import StepOutputs
    from workers.tokenizer import Tokenizer

Tick = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Of each token of a text but the first: log probability (natural), and which token was the likeliest there."""

    log_probabilities: list[float]
    likeliest: list[int]


class Subject:
    """One model under one set of engine settings, in this process."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._config = config

    @property
    def most_tokens(self) -> int:
        """Of a prompt with its answer: context and cache."""
        return min(self._model.max_context, self._model.cache_tokens)

    def figures(self) -> dict[str, object]:
        """What it takes: bytes of weights and of a token's keys and values; what computes it."""
        model = self._model
        return {
            "weight_bytes": model.weight_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "dtype": model.dtype,
            "attention": model.attention,
            "revision": model.revision,
        }

    def read(self, text: str) -> Reading:
        """Teacher forcing: every token after the true ones before it. Raises BenchError for less than two tokens."""
        from workers.model.perplexity import read

        tokens = self._tokenizer.encode_text(text)[: self.most_tokens]
        try:
            found, likeliest = read(self._model, tokens)
        except ValueError as error:
            raise BenchError(str(error)) from None
        return Reading(found, likeliest)

    def tokens(self, text: str) -> int:
        """How many tokens a text is."""
        return len(self._tokenizer.encode_text(text))

    def answer(self, prompts: Sequence[str], most: int, tick: Tick = lambda done, total: None) -> list[str]:
        """Greedy continuations of at most ``most`` tokens, all prompts at once.

        Raises BenchError for a prompt that the engine refuses.
        """
        from workers.engine.loop import Engine
        from workers.protocol import Generate, SamplingParams

        tokens: list[list[int]] = [[] for _ in prompts]
        open_, refused = len(prompts), ""

        def take(news: StepOutputs) -> None:
            nonlocal open_, refused
            for output in news.outputs:
                tokens[int(output.id)] += output.tokens
                if output.finish is not None:
                    open_ -= 1
                    refused = refused or (output.error or "internal" if output.finish == "error" else "")
            tick(len(prompts) - open_, len(prompts))

        model = self._model
        engine = Engine(
            self._config,
            model.runner,
            blocks=model.blocks,
            max_context=model.max_context,
            revision=model.revision,
            eos_ids=model.eos_ids,
            vocab_size=model.vocab_size,
            on_outputs=take,
            windows=model.windows,
            twice_at=model.twice_at,
        )
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0)
            engine.submit(Generate(str(number), self._tokenizer.encode_text(prompt), most, params, scope=b"eval"))
        while open_ and engine.step():
            pass
        engine.stop()
        if open_ or refused:
            raise BenchError(
                f"the engine refused a prompt ({refused or 'it did not end'}); use a larger engine.kv_cache"
            )
        ends = model.eos_ids
        return [self._tokenizer.decode([token for token in answer if token not in ends]) for answer in tokens]


def open_subject(
    source: str,
    config: EngineConfig,
    *,
    base_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Subject:
    """Load a model (seconds). Raises BenchError with the loader's message."""
    from workers.model.loading import load
    from workers.model_store import resolve
    from workers.tokenizer import Tokenizer

    try:
        files = resolve(source, base_dir=base_dir or Path.cwd(), progress=progress)
        return Subject(load(files, config), Tokenizer.load(files.dir), config)
    except ValueError as error:
        raise BenchError(str(error)) from None
