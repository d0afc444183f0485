"""What is registered, by whom, and how a policy is built from ``{use: name, with: {...}}``.

Rules
- A name belongs to one plugin: duplicates stop the start, nobody overrides silently.
- Every mistake of a ``with:`` block is reported at once, each with its path.
- What a factory returns is checked against the Protocol of its kind, including async or sync, before anything uses it.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import pluggy
from pydantic import ValidationError

from policies.spi import (
    KINDS,
    PROTOCOLS,
    Kind,
    LauncherSpec,
    ModelSpec,
    PolicyConfig,
    PolicyConfigError,
    PolicyContext,
    PolicySpec,
)
from policies.strict import quoted
from policies.wording import complaint, known_keys

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SECRET = re.compile(r"key|secret|hash|token|password", re.IGNORECASE)

S = TypeVar("S", PolicySpec, LauncherSpec, ModelSpec)


class RegistrationError(ValueError):
    """A plugin registers something that is malformed or already taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Registered(Generic[S]):
    """A spec and the plugin it came from (``builtin`` or an entry-point name)."""

    spec: S
    origin: str


class Registry:
    """Read-only after construction."""

    def __init__(
        self,
        policies: Iterable[Registered[PolicySpec]],
        launchers: Iterable[Registered[LauncherSpec]] = (),
        models: Iterable[Registered[ModelSpec]] = (),
    ) -> None:
        self._policies: dict[tuple[Kind, str], Registered[PolicySpec]] = {}
        self._launchers: dict[str, Registered[LauncherSpec]] = {}
        self._models: dict[str, Registered[ModelSpec]] = {}
        for policy in policies:
            _check_policy(policy)
            key = (policy.spec.kind, policy.spec.name)
            _add(self._policies, key, policy, f"{policy.spec.kind} policy {policy.spec.name!r}")
        for launcher in launchers:
            _check_target(launcher.spec.target, launcher.origin)
            _check_config(launcher.spec.config, f"plugin {launcher.origin!r}: launcher {launcher.spec.name!r}")
            _add(self._launchers, launcher.spec.name, launcher, f"launcher {launcher.spec.name!r}")
        for model in models:
            _check_target(model.spec.target, model.origin)
            _add(self._models, model.spec.architecture, model, f"model architecture {model.spec.architecture!r}")

    @classmethod
    def from_manager(cls, manager: pluggy.PluginManager) -> Registry:
        """Ask every plugin once. Raises RegistrationError."""
        return cls(
            _collect(manager.hook.forebay_policies, PolicySpec),
            _collect(manager.hook.forebay_launchers, LauncherSpec),
            _collect(manager.hook.forebay_models, ModelSpec),
        )

    def policies(self, kind: Kind | None = None) -> list[Registered[PolicySpec]]:
        """Registered policies, sorted by kind and name."""
        keys = sorted(self._policies, key=lambda key: (KINDS.index(key[0]), key[1]))
        return [self._policies[key] for key in keys if kind is None or key[0] == kind]

    def launchers(self) -> list[Registered[LauncherSpec]]:
        """Registered launchers, sorted by name."""
        return [self._launchers[name] for name in sorted(self._launchers)]

    def models(self) -> list[Registered[ModelSpec]]:
        """Registered model architectures, sorted by name."""
        return [self._models[name] for name in sorted(self._models)]

    def policy(self, kind: Kind, name: str) -> PolicySpec:
        """The spec. Raises PolicyConfigError (path ``use``) that lists the known names."""
        found = self._policies.get((kind, name))
        if found is None:
            known = [other for other_kind, other in self._policies if other_kind == kind]
            raise PolicyConfigError(_unknown(f"{kind} policy", name, known), "use")
        return found.spec

    def launcher(self, name: str) -> LauncherSpec:
        """The spec. Raises PolicyConfigError (path ``use``) that lists the known names."""
        if name not in self._launchers:
            raise PolicyConfigError(_unknown("launcher", name, self._launchers), "use")
        return self._launchers[name].spec

    def validate_launcher(self, name: str, with_: Mapping[str, Any]) -> PolicyConfig:
        """The launcher's config instance. Raises PolicyConfigError with every mistake (paths ``use``, ``with.…``)."""
        spec = self.launcher(name)
        return _validated(spec.config, with_, f"launcher {name!r}")

    def model(self, architecture: str) -> ModelSpec:
        """The spec. Raises PolicyConfigError that lists the known architectures."""
        if architecture not in self._models:
            raise PolicyConfigError(_unknown("model architecture", architecture, self._models))
        return self._models[architecture].spec

    def validate(self, kind: Kind, name: str, with_: Mapping[str, Any]) -> PolicyConfig:
        """The policy's config instance. Raises PolicyConfigError with every mistake (paths ``use``, ``with.…``)."""
        spec = self.policy(kind, name)
        return _validated(spec.config, with_, _titled(spec))

    def build(self, kind: Kind, name: str, with_: Mapping[str, Any], ctx: PolicyContext) -> Any:
        """Validate, make and check one policy. Raises PolicyConfigError with every mistake (see ``validate``)."""
        return self.prepare(kind, name, with_, ctx)()

    def prepare(self, kind: Kind, name: str, with_: Mapping[str, Any], ctx: PolicyContext) -> Callable[[], Any]:
        """Validate, and return what makes a policy per call; the first one is checked. Raises as ``build``."""
        spec = self.policy(kind, name)
        config = self.validate(kind, name, with_)
        context = dataclasses.replace(
            ctx,
            build=lambda kind, name, with_: self.build(kind, name, with_, ctx),
            prepare=lambda kind, name, with_: self.prepare(kind, name, with_, ctx),
        )
        checked = False

        def make() -> Any:
            nonlocal checked
            try:
                policy = spec.factory(config, context)
            except PolicyConfigError as error:
                mistakes = [(f"with.{path}" if path else "with", message) for path, message in error.mistakes]
                raise _refusal(_titled(spec), mistakes) from error
            problem = None if checked else protocol_problem(kind, policy)
            if problem:
                origin = self._policies[kind, name].origin
                raise PolicyConfigError(f"{kind} policy {name!r} of plugin {origin!r} {problem}", "use")
            checked = True
            return policy

        return make


def protocol_problem(kind: Kind, policy: object) -> str | None:
    """What keeps ``policy`` from being of ``kind``'s Protocol (method missing, wrong colour), or None."""
    protocol = PROTOCOLS[kind]
    for name, wanted in vars(protocol).items():
        if not inspect.isfunction(wanted) or (name.startswith("_") and name != "__len__"):
            continue
        actual = getattr(policy, name, None)
        if not callable(actual):
            return f"lacks the method {name!r} of {protocol.__name__}"
        if inspect.iscoroutinefunction(wanted) != inspect.iscoroutinefunction(actual):
            colour = "async" if inspect.iscoroutinefunction(wanted) else "sync"
            return f"has {name!r} in the wrong colour: {protocol.__name__}.{name} is {colour}"
    return None


def _collect(hook: Any, spec_type: type[S]) -> list[Registered[S]]:
    found: list[Registered[S]] = []
    for implementation in hook.get_hookimpls():
        if implementation.hookwrapper or implementation.wrapper:
            raise RegistrationError(f"plugin {implementation.plugin_name!r}: {hook.name} cannot be a wrapper")
        specs = implementation.function()
        if not isinstance(specs, list | tuple) or not all(isinstance(spec, spec_type) for spec in specs):
            raise RegistrationError(
                f"plugin {implementation.plugin_name!r}: {hook.name} must return a list of {spec_type.__name__}"
            )
        found.extend(Registered(spec, implementation.plugin_name) for spec in specs)
    return found


def _add(table: dict[Any, Any], key: Any, item: Registered[Any], what: str) -> None:
    if key in table:
        raise RegistrationError(
            f"{what} is registered twice, by plugins {table[key].origin!r} and {item.origin!r}; rename one"
        )
    table[key] = item


def _check_policy(item: Registered[PolicySpec]) -> None:
    spec = item.spec
    where = f"plugin {item.origin!r}: {spec.kind} policy {spec.name!r}"
    if spec.kind not in KINDS:
        raise RegistrationError(f"{where}: unknown kind; known: {', '.join(KINDS)}")
    if not _NAME.fullmatch(spec.name):
        raise RegistrationError(f"{where}: a name is lower-case letters, digits and _, e.g. 'token_bucket'")
    _check_config(spec.config, where)
    if not callable(spec.factory):
        raise RegistrationError(f"{where}: factory is not callable")
    if not spec.summary.strip():
        raise RegistrationError(f"{where}: summary is empty; say in one line what it does")


def _check_config(config: object, where: str) -> None:
    if not (inspect.isclass(config) and issubclass(config, PolicyConfig)):
        raise RegistrationError(f"{where}: config must be a subclass of PolicyConfig (NoConfig when there is none)")


def _check_target(target: str, origin: str) -> None:
    if not _TARGET.fullmatch(target):
        raise RegistrationError(f"plugin {origin!r}: target {target!r} is not of the form 'package.module:attribute'")


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {quoted(name)}{hint} (known: {', '.join(names)})"


def _mistake(detail: Any, config: type[PolicyConfig]) -> tuple[str, str]:
    path = ".".join(["with", *(str(part) for part in detail["loc"])])
    if detail["type"] == "extra_forbidden":
        key = str(detail["loc"][-1])
        names = known_keys(detail["loc"][:-1], config)
        return path, _unknown("key", key, names) if names else f"unknown key {quoted(key)}; it takes no settings"
    message = complaint(detail, config)
    value = detail.get("input")
    # A mistake names the value, unless it could be a secret that somebody put into the file by accident.
    if detail["type"] != "missing" and not _SECRET.search(path) and isinstance(value, str | int | float | bool):
        message = f"{message} (got {quoted(value)})"
    return path, message


def _titled(spec: PolicySpec) -> str:
    return f"{spec.kind} policy {spec.name!r}"


def _validated(config: type[PolicyConfig], with_: Mapping[str, Any], what: str) -> PolicyConfig:
    try:
        return config.model_validate(dict(with_))
    except ValidationError as error:
        raise _refusal(what, [_mistake(detail, config) for detail in error.errors(include_url=False)]) from None


def _refusal(what: str, mistakes: list[tuple[str, str]]) -> PolicyConfigError:
    lines = "; ".join(f"{path}: {message}" for path, message in mistakes)
    return PolicyConfigError(f"{what}: {lines}", mistakes[0][0], mistakes)
