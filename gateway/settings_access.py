"""The YAML's keys about who may ask for what, and how far it may go: features, groups, users, a class's privacy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.settings_base import Section

Feature = Literal["tools", "logprobs", "n", "json_schema"]
"""What a request may use besides plain text; a request's ``features()`` names what it does use."""


class NarrowedLimits(Section):
    """Limits of one request."""

    max_output_tokens: int | None = Field(None, ge=1)
    max_context_tokens: int | None = Field(None, ge=1)


class Narrowed(Section):
    """What a group or a user may do at most, inside what its tenant may. null: what the tenant may."""

    models: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    features: tuple[Feature, ...] | None = None
    limits: NarrowedLimits = NarrowedLimits()


class ClassPrivacy(Section):
    """Where requests of a class may go; the tenant has to allow it too."""

    allow_external: bool = True
