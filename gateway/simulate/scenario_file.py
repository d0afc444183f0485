"""Reading a scenario: every mistake at once, with path and line; policies are checked against what is registered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gateway import yaml_source
from gateway.config_file import ConfigErrors, validated
from gateway.paths import PathError, config_dir
from gateway.simulate.scenario import Scenario, Use
from gateway.yaml_source import Mistake, Source
from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import Kind, PolicyConfigError, PolicyContext

SCENARIOS = "scenarios"
_KINDS: dict[str, Kind] = {"policy": "scheduling", "admission": "admission", "quota": "quota", "routing": "routing"}


@dataclass(frozen=True, slots=True)
class LoadedScenario:
    """A scenario without mistakes, and where it came from."""

    scenario: Scenario
    path: Path
    registry: Registry

    @property
    def base_dir(self) -> Path:
        """Where its relative paths start."""
        return self.path.parent

    def context(self) -> PolicyContext:
        """For building its policies."""
        return PolicyContext(base_dir=str(self.base_dir))

    def under(self, policy: str | None = None, seed: int | None = None) -> LoadedScenario:
        """The same with another scheduling policy (with its default settings) or seed. Raises ConfigErrors.

        What tokens count in the report stays as the file's own policy charges them.
        """
        scenario = self.scenario
        if seed is not None:
            scenario = scenario.model_copy(update={"seed": seed})
        if policy is not None and policy != scenario.policy.use:
            scenario = scenario.model_copy(update={"service": scenario.costs, "policy": Use(use=policy)})
        changed = replace(self, scenario=scenario)
        mistakes = _check(scenario, self.registry)
        if mistakes:
            raise ConfigErrors(self.path, mistakes)
        return changed


def resolve(name: str) -> Path:
    """The file that ``name`` means: a path, or the name of a shipped scenario. Raises PathError listing both."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.absolute()
    folder = config_dir() / SCENARIOS
    if path.name == name and (folder / f"{name}.yaml").is_file():
        return folder / f"{name}.yaml"
    known = ", ".join(shipped()) or "none"
    raise PathError(f"there is no file {name!r} (looked at {path.absolute()}), and no shipped scenario of it ({known})")


def shipped() -> list[str]:
    """Names of the shipped scenarios."""
    return sorted(path.stem for path in (config_dir() / SCENARIOS).glob("*.yaml"))


def load(path: str | Path, registry: Registry | None = None) -> LoadedScenario:
    """Read and check one file. Raises ConfigErrors with every mistake, PluginError for a plugin that does not load."""
    path = Path(path).absolute()
    try:
        source = yaml_source.read(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigErrors(path, [Mistake((), f"cannot be read: {why}")]) from None
    if not isinstance(source.data, dict) and not source.mistakes:
        source.mistakes.append(Mistake((), "must be a mapping (seed:, policy:, workers:, tenants: …)", 1))
    scenario, mistakes = validated(source, Scenario) if isinstance(source.data, dict) else (None, [])
    if scenario is None or mistakes or source.mistakes:
        found = sorted([*source.mistakes, *mistakes], key=lambda mistake: mistake.line or 0)
        raise ConfigErrors(path, found)
    registry = registry or Registry.from_manager(make_manager(scenario.plugins))
    mistakes = [_located(mistake, source) for mistake in _check(scenario, registry)]
    if mistakes:
        raise ConfigErrors(path, mistakes)
    return LoadedScenario(scenario, path, registry)


def _check(scenario: Scenario, registry: Registry) -> list[Mistake]:
    """What the registry has against the policies named."""
    mistakes: list[Mistake] = []
    for key, kind in _KINDS.items():
        use: Use = getattr(scenario, key)
        try:
            registry.validate(kind, use.use, use.with_)
        except PolicyConfigError as error:
            for path, message in error.mistakes:
                steps = tuple(int(step) if step.isdigit() else step for step in path.split(".") if step)
                mistakes.append(Mistake((key, *steps), message))
    return mistakes


def _located(mistake: Mistake, source: Source) -> Mistake:
    return replace(mistake, line=source.line(mistake.path))
