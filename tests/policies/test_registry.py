"""The registry: one owner per name, every mistake at once with its path, objects checked before use."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from policies.manager import make_manager, register
from policies.registry import Registered, RegistrationError, Registry, protocol_problem
from policies.scheduling.fcfs import FcfsScheduler
from policies.spi import (
    LauncherSpec,
    ModelSpec,
    NoConfig,
    PolicyConfig,
    PolicyConfigError,
    PolicyContext,
    PolicySpec,
    hookimpl,
)

REGISTRY = Registry.from_manager(make_manager())
CONTEXT = PolicyContext(env={"K": "s" * 64}, server_secret=b"k" * 32)


def refusal(kind: Any, name: str, with_: dict[str, Any]) -> PolicyConfigError:
    with pytest.raises(PolicyConfigError) as caught:
        REGISTRY.build(kind, name, with_, CONTEXT)
    return caught.value


def spec(name: str = "mine", **fields: Any) -> PolicySpec:
    values = {"kind": "scheduling", "name": name, "config": NoConfig, "factory": lambda c, x: FcfsScheduler()}
    return PolicySpec(**{**values, "summary": "A test's own.", **fields})


def test_unknown_names_list_the_known_ones() -> None:
    error = refusal("scheduling", "vct", {})
    assert error.mistakes[0][0] == "use"
    assert "did you mean 'vtc'? (known: drr, edf, fcfs, " in error.mistakes[0][1]


def test_every_mistake_is_reported_with_its_path() -> None:
    error = refusal("admission", "bounded", {"max_queued": 0, "max_wait": 3, "max_wait_s": "soon"})
    found = dict(error.mistakes)
    assert set(found) == {"with.max_queued", "with.max_wait", "with.max_wait_s"}
    assert "greater than or equal to 1 (got 0)" in found["with.max_queued"]
    assert "did you mean 'max_wait_s'?" in found["with.max_wait"]
    assert "(got 'soon')" in found["with.max_wait_s"]
    assert "admission policy 'bounded': with.max_queued" in str(error)


def test_nested_keys_and_policies_have_full_paths() -> None:
    chain = {
        "policies": [
            {"use": "api_key", "with": {"keys": [{"hash": "sha256:00", "tenant": "a", "colour": 1}]}},
            {"use": "nothing"},
            {"use": "jwt", "with": {"algorithms": ["HS256"], "audience": "a", "issuer": "i", "key_env": "MISSING"}},
        ]
    }
    found = dict(refusal("auth", "chain", chain).mistakes)
    assert set(found) == {
        "with.policies.0.with.keys.0.hash",
        "with.policies.0.with.keys.0.colour",
        "with.policies.1.use",
        "with.policies.2.with.key_env",
    }
    assert "MISSING is not set" in found["with.policies.2.with.key_env"]


def test_a_policy_without_settings_says_so() -> None:
    assert refusal("quota", "unlimited", {"lease": 1}).mistakes == (
        ("with.lease", "unknown key 'lease'; it takes no settings"),
    )


def test_values_that_could_be_secrets_are_not_repeated() -> None:
    class Config(PolicyConfig):
        api_key: int = 0
        note: str = Field("", max_length=3)

    registry = Registry([Registered(spec(config=Config), "p")])
    with pytest.raises(PolicyConfigError) as caught:
        registry.validate("scheduling", "mine", {"api_key": "hunter2", "note": "x" * 500})
    assert "hunter2" not in str(caught.value)
    assert len(dict(caught.value.mistakes)["with.note"]) < 200


def test_a_name_has_one_owner() -> None:
    class Twin:
        @hookimpl
        def forebay_policies(self) -> list[PolicySpec]:
            return [spec("vtc")]

    manager = make_manager()
    register(manager, Twin, "twin")
    with pytest.raises(RegistrationError, match=r"'vtc' is registered twice, by plugins '\w+' and '\w+'"):
        Registry.from_manager(manager)
    for kind, item in (("launchers", LauncherSpec("local", "a:b")), ("models", ModelSpec("Llama", "a:b"))):
        with pytest.raises(RegistrationError, match="registered twice"):
            Registry([], **{kind: [Registered(item, "p"), Registered(item, "q")]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "weather"}, "unknown kind"),
        ({"name": "Mine!"}, "lower-case"),
        ({"config": dict}, "subclass of PolicyConfig"),
        ({"factory": None}, "not callable"),
        ({"summary": " "}, "summary is empty"),
    ],
)
def test_malformed_specs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        Registry([Registered(spec(**fields), "p")])


@pytest.mark.parametrize("answer", [None, spec(), ["vtc"]])
def test_a_hook_must_answer_with_a_list_of_specs(answer: Any) -> None:
    class Odd:
        @hookimpl
        def forebay_policies(self) -> Any:
            return answer

    manager = make_manager()
    register(manager, Odd, "odd")
    with pytest.raises(RegistrationError, match="'odd': forebay_policies must return a list of PolicySpec"):
        Registry.from_manager(manager)


def test_a_registration_cannot_be_a_wrapper() -> None:
    class Wrapper:
        @hookimpl(wrapper=True)
        def forebay_policies(self) -> Any:
            return (yield)

    manager = make_manager()
    register(manager, Wrapper, "wrapper")
    with pytest.raises(RegistrationError, match="cannot be a wrapper"):
        Registry.from_manager(manager)


class AsyncPop(FcfsScheduler):
    async def pop(self, now: float, fits: Any) -> Any:  # type: ignore[override]
        return None


class NoDrain:
    push = pop = requeue = discard = charge = dump = load = explain = __len__ = lambda self, *args: None


@pytest.mark.parametrize(
    ("made", "message"),
    [(AsyncPop, "has 'pop' in the wrong colour: SchedulingPolicy.pop is sync"), (NoDrain, "lacks the method 'drain'")],
)
def test_what_a_factory_returns_is_checked(made: Any, message: str) -> None:
    registry = Registry([Registered(spec(factory=lambda config, ctx: made()), "theirs")])
    with pytest.raises(PolicyConfigError, match=f"of plugin 'theirs' {message}"):
        registry.build("scheduling", "mine", {}, CONTEXT)
    assert protocol_problem("scheduling", FcfsScheduler()) is None


def test_launchers_and_models_are_names_of_things_that_are_not_imported() -> None:
    assert REGISTRY.launcher("local").target == "workers.launchers.local:LocalLauncher"
    assert REGISTRY.launcher("static").target == "workers.launchers.static:StaticLauncher"
    assert REGISTRY.model("LlamaForCausalLM").target == "workers.model.llama:LlamaDecoder"
    assert [item.spec.name for item in REGISTRY.launchers()] == ["local", "static"]
    names = [item.spec.architecture for item in REGISTRY.models()]
    assert names == sorted(names)
    assert "Qwen3ForCausalLM" in names
    with pytest.raises(PolicyConfigError, match="did you mean 'local'"):
        REGISTRY.launcher("lokal")
    with pytest.raises(PolicyConfigError, match="did you mean 'LlamaForCausalLM'"):
        REGISTRY.model("LlamaForCasualLM")
    with pytest.raises(RegistrationError, match="not of the form"):
        Registry([], [Registered(LauncherSpec("x", "a module"), "p")])
