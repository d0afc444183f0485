"""Plugins: loaded by name only, checked before anything runs; observers cannot hurt."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from policies import hookspecs
from policies.manager import BUILTIN, PluginError, make_manager, notify, register, tenant_from_claims
from policies.registry import Registry
from policies.scheduling.fcfs import FcfsScheduler
from policies.spi import ENTRY_POINT_GROUP, NoConfig, PolicyContext, PolicySpec, hookimpl
from policies.testing import make_job
from policies.types import JobEvent, Transition


class Lottery:
    @hookimpl
    def forebay_policies(self) -> list[PolicySpec]:
        return [PolicySpec("scheduling", "lottery", NoConfig, lambda config, ctx: FcfsScheduler(), "Draws lots.")]


def module(name: str, **members: Any) -> EntryPoint:
    """An entry point whose module exists only in this process."""
    made = ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
    return EntryPoint("mine", name, ENTRY_POINT_GROUP)


@pytest.fixture
def points() -> Any:
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def event() -> JobEvent:
    return JobEvent(make_job("x"), Transition.QUEUED, 0.0)


def test_builtins_come_through_the_same_hooks() -> None:
    manager = make_manager()
    assert [name for name, _ in manager.list_name_plugin()] == [BUILTIN]
    assert {item.origin for item in Registry.from_manager(manager).policies()} == {BUILTIN}


@pytest.mark.usefixtures("points")
def test_a_plugin_is_loaded_only_when_it_is_named() -> None:
    point = EntryPoint("mine", "tests.policies.test_manager:Lottery", ENTRY_POINT_GROUP)
    assert not make_manager(entry_points=[point]).has_plugin("mine")
    registry = Registry.from_manager(make_manager(["mine"], entry_points=[point]))
    assert [item.spec.name for item in registry.policies("scheduling") if item.origin == "mine"] == ["lottery"]
    assert isinstance(registry.build("scheduling", "lottery", {}, PolicyContext()), FcfsScheduler)


def test_an_unknown_plugin_names_those_that_are_installed() -> None:
    point = EntryPoint("lottery", "nowhere", ENTRY_POINT_GROUP)
    with pytest.raises(PluginError, match=r"'lotery': not installed; did you mean 'lottery'\? .*: lottery\)"):
        make_manager(["lotery"], entry_points=[point])
    with pytest.raises(PluginError, match=r"forebay\.plugins: none"):
        make_manager(["x"], entry_points=[])


def test_two_distributions_with_one_name_are_refused() -> None:
    points = [EntryPoint("mine", value, ENTRY_POINT_GROUP) for value in ("one", "two")]
    with pytest.raises(PluginError, match=r"several distributions offer it \(one, two\)"):
        make_manager(["mine"], entry_points=points)


@pytest.mark.usefixtures("points")
def test_a_plugin_that_does_not_import_is_named() -> None:
    point = EntryPoint("mine", "no_such_module_anywhere", ENTRY_POINT_GROUP)
    with pytest.raises(PluginError, match="loading no_such_module_anywhere failed: ModuleNotFoundError"):
        make_manager(["mine"], entry_points=[point])


def forebay_polices() -> list[PolicySpec]:
    return []


def forebay_policies() -> list[PolicySpec]:
    return []


def forebay_job_event(event: JobEvent, colour: str) -> None:
    return None


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"forebay_polices": hookimpl(forebay_polices)}, "unknown hook 'forebay_polices'; did you mean"),
        ({"forebay_polices": forebay_polices}, "unknown hook 'forebay_polices'; did you mean 'forebay_policies'"),
        ({"forebay_policies": forebay_policies}, "lacks the marker; put '@hookimpl'"),
        ({"forebay_job_event": hookimpl(forebay_job_event)}, "colour"),
        ({"anything": hookimpl(specname="forebay_unheard_of")(lambda: None)}, "implements no hook"),
        ({}, "implements no hook; known hooks: forebay_job_event"),
    ],
)
def test_mistakes_in_a_plugin_stop_the_start(members: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_manager(["mine"], entry_points=[module("forebay_test_plugin", **members)])


def test_a_hook_that_pluggy_finds_but_nobody_specified_stops_the_start() -> None:
    class Sneaky(Lottery):
        @hookimpl(specname="forebay_unheard_of")
        def quietly(self) -> None: ...

    with pytest.raises(PluginError, match="forebay_unheard_of"):
        register(make_manager(), Sneaky(), "sneaky")


def test_a_plugin_listed_twice_is_refused() -> None:
    manager = make_manager()
    register(manager, Lottery, "mine")
    with pytest.raises(PluginError, match="listed twice"):
        register(manager, Lottery, "mine")


def test_a_class_that_needs_arguments_is_refused() -> None:
    class Needy(Lottery):
        def __init__(self, what: str) -> None: ...

    with pytest.raises(PluginError, match="without arguments"):
        register(make_manager(), Needy, "needy")


def test_an_observer_that_raises_is_skipped_and_reported() -> None:
    heard: list[str] = []

    class Good:
        @hookimpl
        def forebay_job_event(self, event: JobEvent) -> None:
            heard.append(f"{event.job.id} {event.transition}")

    class Bad:
        @hookimpl
        def forebay_job_event(self, event: JobEvent) -> None:
            raise RuntimeError("observer is broken")

    class Silent:
        @hookimpl
        def forebay_job_event(self) -> None:
            heard.append("silent")

    manager = make_manager()
    for name, plugin in (("good", Good), ("bad", Bad), ("silent", Silent), ("good too", Good)):
        register(manager, plugin, name)
    errors: list[tuple[str, str]] = []
    notify(manager, event(), lambda plugin, error: errors.append((plugin, str(error))))
    assert heard == ["x queued", "silent", "x queued"]
    assert errors == [("bad", "observer is broken")]


def test_tenant_from_claims_first_answer_wins() -> None:
    assert tenant_from_claims(make_manager()) is None

    class Mapper:
        def __init__(self, answer: Any = None) -> None:
            self.answer = answer

        @hookimpl
        def forebay_tenant_from_claims(self, claims: Any) -> Any:
            return self.answer or claims.get("org")

    manager = make_manager()
    register(manager, Mapper(), "mapper")
    ask = tenant_from_claims(manager)
    assert ask is not None
    assert ask({"org": "search"}) == "search"
    assert ask({}) is None
    register(manager, Mapper(7), "wrong")
    with pytest.raises(TypeError, match="answered int"):
        ask({})


def test_every_hook_is_documented() -> None:
    names = [name for name in dir(hookspecs) if name.startswith("forebay_")]
    assert len(names) == 5
    for name in names:
        assert len((getattr(hookspecs, name).__doc__ or "").split()) >= 5, name
