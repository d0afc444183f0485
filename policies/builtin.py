"""The built-in plugin: registers through the same hooks as anybody's.

Launchers and models are named as strings: this module, like all of ``policies``, imports nothing of ``workers``.
"""

from __future__ import annotations

from policies.admission import bounded
from policies.admission import open as open_admission
from policies.auth import api_key, chain, jwt, jwt_issuers, mtls_proxy, none
from policies.cache_scope import group, public_prefix, tenant, user
from policies.quota import ledger, shared, token_bucket, unlimited
from policies.routing import least_loaded, prefix_affinity, round_robin
from policies.scheduling import drr, edf, fcfs, hierarchical, locality, priority, sjf, vtc, wfq
from policies.spi import LauncherSpec, ModelSpec, PolicySpec, hookimpl


@hookimpl
def forebay_policies() -> list[PolicySpec]:
    """One line per policy; a new one is a module with a ``SPEC`` and its name here."""
    return [
        api_key.SPEC,
        chain.SPEC,
        jwt.SPEC,
        jwt_issuers.SPEC,
        mtls_proxy.SPEC,
        none.SPEC,
        ledger.SPEC,
        shared.SPEC,
        token_bucket.SPEC,
        unlimited.SPEC,
        group.SPEC,
        public_prefix.SPEC,
        tenant.SPEC,
        user.SPEC,
        drr.SPEC,
        edf.SPEC,
        fcfs.SPEC,
        hierarchical.SPEC,
        locality.SPEC,
        priority.SPEC,
        sjf.SPEC,
        vtc.SPEC,
        wfq.SPEC,
        least_loaded.SPEC,
        prefix_affinity.SPEC,
        round_robin.SPEC,
        bounded.SPEC,
        open_admission.SPEC,
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
    dense, mixture = "workers.model.llama:LlamaDecoder", "workers.model.moe:MoeDecoder"
    return [
        ModelSpec("LlamaForCausalLM", dense, "Llama and what is built like it: RMSNorm, RoPE, GQA, SwiGLU."),
        ModelSpec("MistralForCausalLM", dense, "Llama's decoder, with or without sliding windows."),
        ModelSpec("Qwen2ForCausalLM", dense, "Llama's decoder with biases of q, k and v."),
        ModelSpec("Qwen3ForCausalLM", dense, "Llama's decoder with normed q and k."),
        ModelSpec("Gemma2ForCausalLM", dense, "Windows in every second layer, soft caps, norms behind both parts."),
        ModelSpec("Gemma3ForCausalLM", dense, "Windows in five of six layers, normed q and k."),
        ModelSpec("MixtralForCausalLM", mixture, "A mixture of experts in place of the MLP."),
        ModelSpec("Qwen2MoeForCausalLM", mixture, "Experts, and one that all tokens share."),
        ModelSpec("Qwen3MoeForCausalLM", mixture, "Experts, with normed q and k."),
    ]
