"""``engine.speculation``: who guesses the next tokens. No torch: the gateway validates with this model too."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from policies.strict import StrictScalars

MAX_DRAFTS = 32


class Speculation(StrictScalars):
    """Guess a few tokens cheaply, let the model check them all in one step, keep those that it would have chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["ngram", "draft"]
    """``ngram`` copies what followed the last tokens where they stood before, in prompt or answer. ``draft`` asks a
    smaller model of the same vocabulary."""
    tokens: int = Field(4, ge=1, le=MAX_DRAFTS)
    """Most guesses per sequence and step. How many it is, none included, follows from how often they were right and
    what a step takes."""
    draft_model: str | None = None
    """Source of the smaller model, written as ``models[].source``. Its keys and values lie in the same blocks."""
    ngram_min: int = Field(2, ge=1, le=16)
    """So many last tokens must have stood together before."""
    ngram_max: int = Field(4, ge=1, le=16)
    """Looked for first."""

    @field_validator("draft_model")
    @classmethod
    def _a_source(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "\0" in value):
            raise ValueError(f"{value!r} is no model; write a source as in models[].source")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.method == "draft" and not self.draft_model:
            raise ValueError(
                "draft_model: method draft needs one; name a small model of the same vocabulary, or write method: ngram"
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise ValueError(
                f"draft_model: {self.draft_model!r} is not used by method ngram; remove it, or write method: draft"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min: {self.ngram_min} is above ngram_max={self.ngram_max}; it may be at most the same"
            )
        return self
