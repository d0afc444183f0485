"""One pass of a short text through a model, in which every linear is rounded to 4 bits when the text reaches it.

Rules
- The decoder is built as always, but its matrices are *pending*: names of rows, no numbers. A linear that is called
  reads its rows, fits codes to its inputs (``fitting.py``) and computes on with the rounded weights, so whatever comes
  behind it is fitted to the inputs that it will get in service.
- At any time one linear's weights are in memory, besides embedding and head, so a model needs no more room than its
  rounded self and the text's activations.
- A linear that the text never reaches (an expert that no token chose) is rounded without data, and so is what a
  decoder uses otherwise than by calling a linear.
- The text is shipped with this module, was written for it, and nothing is measured on it anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence as Prompt
from workers.model.attention import AttentionShape, backend
from workers.model.batch import Batch, build
from workers.model.config import ModelConfig
from workers.model.kv_cache import make_cache
from workers.model.kv_tables import tables_of
from workers.model.quant.fitting import fitted
from workers.model.quant.linear import QuantisedLinear
from workers.model.quant.matrix import Format, Quantised, Stacked, cat
from workers.model.quant.rounding import RangeError, check, int4, int8
from workers.model.quant.scheme import stays_fine
from workers.model.weights import Source, Weights, unfit
from workers.protocol import SamplingParams

MOST_TOKENS = 6144
"""Of the text that are used."""
LENGTH = 512
"""Tokens of the pieces that it is cut into."""
_BLOCK = 16


class PendingError(TypeError):
    """A decoder asked a pending matrix for its numbers, which only a ``QuantisedLinear`` that is called can have."""


def _no_numbers(*_: Tensor) -> tuple[Tensor, None]:
    raise PendingError


PENDING = Format("pending", 64, (), _no_numbers)
"""Codes [rows, 1] are the rows' numbers in ``_Pass``'s count."""


def text() -> str:
    """What models are calibrated on."""
    return (files("workers.model.quant") / "calibration.txt").read_text(encoding="utf-8")


def calibrated(
    make: Callable[..., Any],
    config: ModelConfig,
    source: Source,
    pieces: Sequence[list[int]],
    device: torch.device,
) -> dict[str, Quantised]:
    """The matrices that a decoder of class ``make`` takes and int4 puts in 4 bits, by name, on the CPU.

    ``pieces``: ``text()`` as prompts of at most ``LENGTH`` tokens. Reads ``source`` from beginning to end. Raises
    ModelStoreError.
    """
    with torch.inference_mode():
        return _Pass(source, config, device).run(make, [piece for piece in pieces if len(piece) > 1])


class _Pass:
    def __init__(self, source: Source, config: ModelConfig, device: torch.device) -> None:
        self._source, self._config, self._device = source, config, device
        self._names: list[str] = []
        self._firsts = [0]
        """Number of each name's first row; one more at the end."""
        self._parts: dict[str, list[tuple[Tensor, Quantised]]] = {}
        """Of each matrix, which of its rows are rounded, and those rows."""

    def run(self, make: Callable[..., Any], pieces: Sequence[list[int]]) -> dict[str, Quantised]:
        config, device = self._config, self._device
        length = min(LENGTH, config.max_context)
        weights = Weights(self._source, torch.float32, device, fresh=False, rounding=self._pending)
        with contextlib.suppress(PendingError):  # what it reached before is fitted all the same
            self._show(make(config, weights, length), pieces)
        return {name: self._rounded(name) for name in self._names}

    def _show(self, decoder: Any, pieces: Sequence[list[int]]) -> None:
        config, device = self._config, self._device
        if self._names and pieces and isinstance(decoder, nn.Module):
            for module in decoder.modules():
                if isinstance(module, QuantisedLinear):
                    module.register_forward_pre_hook(self._reached)
            batch = build([_prompt(piece) for piece in pieces], _BLOCK, device)
            attend = _attention(config, max(map(len, pieces)), batch, device)
            decoder(batch.tokens, batch.positions, attend, torch.empty(0, dtype=torch.int64, device=device))

    def _pending(self, name: str, weight: Tensor) -> Quantised:
        if stays_fine(name):
            return int8(weight)
        first = self._firsts[-1]
        self._names.append(name)
        self._firsts.append(first + len(weight))
        return Quantised(PENDING, weight.shape[1], torch.arange(first, first + len(weight))[:, None], ())

    def _reached(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """A linear is about to multiply: round it first."""
        assert isinstance(module, QuantisedLinear)
        matrix = module.matrix
        layers = matrix.layers if isinstance(matrix, Stacked) else (matrix,)
        if all(one.format is not PENDING for one in layers):
            return
        x = inputs[0].float()
        moments = x.mT @ x
        made = [self._fitted(one, moments) if one.format is PENDING else one for one in layers]
        module.matrix = Stacked(tuple(made)) if len(made) > 1 else made[0]

    def _fitted(self, pending: Quantised, moments: Tensor) -> Quantised:
        device, owners = moments.device, self._owners(pending.codes[:, 0].cpu())
        weight = torch.empty(pending.shape, device=device)
        for name, own, places in owners:
            weight[places.to(device)] = self._read(name)[own].to(device, torch.float32)
        made = fitted(weight, moments)
        for name, own, places in owners:
            self._parts.setdefault(name, []).append((own, _picked(made, places)))
        return made

    def _owners(self, rows: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Whose rows these are: name, which of its rows, and their places among ``rows``."""
        numbers = torch.bucketize(rows, torch.tensor(self._firsts[1:]), right=True)
        found = []
        for number in sorted(set(numbers.tolist())):
            places = (numbers == number).nonzero()[:, 0]
            found.append((self._names[number], rows[places] - self._firsts[number], places))
        return found

    def _read(self, name: str) -> Tensor:
        weight = self._source.read(name)
        try:
            check(weight)
        except RangeError as error:
            raise unfit(name, error) from error
        return weight

    def _rounded(self, name: str) -> Quantised:
        """All rows of a matrix in their order; without data where the text did not reach them."""
        parts = self._parts.get(name)
        if parts is None:
            return int4(self._read(name))
        whole = cat([part for _, part in parts])
        return _picked(whole, torch.cat([own for own, _ in parts]).argsort())


def _picked(made: Quantised, places: Tensor) -> Quantised:
    return made.rows(lambda part: part[places.to(part.device)].cpu())


def _prompt(tokens: list[int]) -> Chunk:
    blocks = list(range(-(-len(tokens) // _BLOCK)))  # the same for all: nothing is kept
    return Chunk(Prompt("text", 0, tokens, len(tokens), 1, SamplingParams(), blocks=blocks), 0, len(tokens))


def _attention(config: ModelConfig, length: int, batch: Batch, device: torch.device) -> Callable[..., Tensor]:
    """Of whole prompts, which need no cache: all that they attend to is in this step."""
    tables = tables_of(config, length)
    kind = backend("batched", AttentionShape.of(config, tables, torch.float32), device)
    unread = make_cache(config, 2 * tables.count, _BLOCK, torch.float32, device, tables=tables)
    steps = {window: kind.prepare(batch, window) for window in set(tables.windows)}

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return kind.attend(layer, queries, keys, values, unread, steps[tables.window(layer)])

    return attend
