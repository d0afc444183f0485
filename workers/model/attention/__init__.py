"""Attention over the paged cache: one Protocol, several backends, chosen by name."""

from __future__ import annotations

from workers.model.attention.base import Attend, AttentionBackend, AttentionShape, Chosen, backend, choose

__all__ = ["Attend", "AttentionBackend", "AttentionShape", "Chosen", "backend", "choose"]
