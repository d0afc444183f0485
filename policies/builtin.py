"""The built-in plugin: registers through the same hooks as anybody's.

Launchers and models are named as strings: this module, like all of ``policies``, imports nothing of ``workers``.
"""

from __future__ import annotations

from policies.scheduling import fcfs, vtc
from policies.spi import LauncherSpec, ModelSpec, PolicySpec, hookimpl


@hookimpl
def forebay_policies() -> list[PolicySpec]:
    """One line per policy; a new one is a module with a ``SPEC`` and its name here."""
    return [
        fcfs.SPEC,
        vtc.SPEC,
    ]


@hookimpl
def forebay_launchers() -> list[LauncherSpec]:
    """How workers are started."""
    return [
        LauncherSpec("local", "workers.launchers.local:LocalLauncher", "Starts worker processes on this machine."),
        LauncherSpec("static", "workers.launchers.static:StaticLauncher", "Connects to workers that run elsewhere."),
    ]


@hookimpl
def forebay_models() -> list[ModelSpec]:
    """Which architectures a worker can load, by the name in a model's config.json."""
    return [
        ModelSpec("LlamaForCausalLM", "workers.model.llama:Llama", "Llama family: RMSNorm, RoPE, GQA, SwiGLU."),
    ]
