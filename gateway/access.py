"""What a verified caller may ask for. Pure.

Rules
- A tenant has a grant, and so may its groups and users have. A caller may do what *all* of its grants allow: groups
  and users only narrow, whatever they list.
- A refusal is a 403 that names what is not allowed and whose grant it is. One exception: a model that the tenant itself
  may not use does not exist for it (404), so that nobody learns other tenants' models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gateway.errors import ApiError, forbidden
from gateway.settings_access import Narrowed

PARAMS = {"json_schema": "response_format"}
"""Fields that ask for a feature, where they are not called like it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one tenant, group or user may do; None: everything."""

    whose: str
    """``Your tenant``, ``The group 'interns'``, ``The user 'ann'``."""
    models: tuple[str, ...] | None = None
    """Names or shell patterns (``smol*``)."""
    classes: frozenset[str] | None = None
    features: frozenset[str] | None = None
    max_output_tokens: int | None = None
    max_context_tokens: int | None = None

    @classmethod
    def of(cls, whose: str, narrowed: Narrowed) -> Grant:
        """As the configuration says."""
        return cls(
            whose,
            models=narrowed.models,
            classes=None if narrowed.classes is None else frozenset(narrowed.classes),
            features=None if narrowed.features is None else frozenset(narrowed.features),
            max_output_tokens=narrowed.limits.max_output_tokens,
            max_context_tokens=narrowed.limits.max_context_tokens,
        )

    def may_use(self, model: str) -> bool:
        """Whether ``model`` is on its list."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

    def may_have(self, service_class: str) -> bool:
        """Whether it may run in this class."""
        return self.classes is None or service_class in self.classes


def least(own: int | None, others: Iterable[int | None]) -> int | None:
    """The smallest limit that is one."""
    return min((limit for limit in (own, *others) if limit is not None), default=None)


def check_features(used: Iterable[str], grants: Iterable[Grant]) -> None:
    """Raises ApiError 403 for a feature that one of ``grants`` does not have."""
    for feature in sorted(used):
        for grant in grants:
            if grant.features is not None and feature not in grant.features:
                raise forbidden(
                    f"{grant.whose} may not use {feature}.",
                    code="feature_not_allowed",
                    param=PARAMS.get(feature, feature),
                )


def model_refused(model: str, grants: Iterable[Grant], *aliases: str) -> ApiError | None:
    """403 where one of ``grants`` does not have ``model``, by that or another of its names."""
    for grant in grants:
        if not any(map(grant.may_use, (model, *aliases))):
            return forbidden(f"{grant.whose} may not use the model {model!r}.", code="model_not_allowed", param="model")
    return None


def class_refused(service_class: str, grants: Iterable[Grant]) -> ApiError | None:
    """403 where one of ``grants`` does not have this class."""
    for grant in grants:
        if not grant.may_have(service_class):
            return forbidden(f"{grant.whose} may not use the class {service_class!r}.", code="class_not_allowed")
    return None
