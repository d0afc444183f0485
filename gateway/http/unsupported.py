"""Fields that clients know from the OpenAI API, vLLM, SGLang or llama-server, that would change the answer, and that
are not implemented.

Such a field gets 400 with its name, unless its value asks for what happens anyway (``functions: []``, ``top_a: 0``):
an ignored field would be a wrong answer that looks right. Everything not listed here nor in ``schemas.py`` is harmless
or none of the caller's business (``cache_salt``, ``tenant``, ``priority`` …) and is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a field is refused, and which values of it are fine because they ask for nothing."""

    why: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """True for null and for the neutral values; compared with their type, so that 0 is not False. What is null in
        an object is not given there either."""
        if isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if inner is not None}
        return value is None or any(type(value) is type(same) and value == same for same in self.neutral)


_TOOLS = "it is the old form; use 'tools', 'tool_choice' and 'tool_calls'"
_GUIDED = "use 'response_format' with a JSON schema"
_TEMPLATE = "the chat template is the operator's; a request cannot bring or parametrise one"
_AUDIO = "only text goes in and out"
_STOP = "not implemented; use 'stop' with up to four strings instead"
_SAMPLER = "this sampling method is not implemented; use temperature, top_p, top_k and min_p"
_PROMPT = "the prompt is always encoded as the model expects it; send token ids to /v1/completions for full control"
_OUTPUT = "the output always comes as plain text in the API's own shape"
_TRANSFER = "internal to the server; requests cannot set it"

_BOTH: dict[str, Unsupported] = {
    "top_a": Unsupported(_SAMPLER, (0, 0.0)),
    "tfs": Unsupported(_SAMPLER, (1, 1.0)),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "dynatemp_range": Unsupported(_SAMPLER, (0, 0.0)),
    "xtc_probability": Unsupported(_SAMPLER, (0, 0.0)),
    "dry_multiplier": Unsupported(_SAMPLER, (0, 0.0)),
    "logits_processors": Unsupported(_SAMPLER, ([],)),
    "custom_logit_processor": Unsupported(_SAMPLER, ("",)),
    "top_n_sigma": Unsupported(_SAMPLER, (-1, -1.0, 0, 0.0)),
    "no_repeat_ngram_size": Unsupported("not implemented; use 'repetition_penalty'", (0,)),
    "repeat_penalty": Unsupported("it is called 'repetition_penalty' here", (1, 1.0)),
    "max_new_tokens": Unsupported("it is called 'max_tokens' here"),
    "n_predict": Unsupported("it is called 'max_tokens' here", (-1,)),
    "n_probs": Unsupported("it is called 'logprobs' here", (0,)),
    "return_hidden_states": Unsupported("hidden states are not told", (False,)),
    "allowed_token_ids": Unsupported("use 'logit_bias' to favour tokens", ([],)),
    "stop_regex": Unsupported(_STOP, ("", [])),
    "include_stop_str_in_output": Unsupported("stop strings are always removed", (False,)),
    "no_stop_trim": Unsupported("stop strings are always removed", (False,)),
    "skip_special_tokens": Unsupported("special tokens are never part of the text", (True,)),
    "spaces_between_special_tokens": Unsupported("special tokens are never part of the text", (True, False)),
    "truncate_prompt_tokens": Unsupported("prompts are never cut silently; shorten it before sending"),
    "prompt_logprobs": Unsupported("/v1/completions gives a prompt's with 'echo' and 'logprobs'", (0, False)),
    "add_special_tokens": Unsupported(_PROMPT),
    "structured_outputs": Unsupported(_GUIDED, ({},)),
    "structural_tag": Unsupported(_GUIDED),
    "guided_json": Unsupported(_GUIDED),
    "guided_regex": Unsupported(_GUIDED),
    "guided_choice": Unsupported(_GUIDED),
    "guided_grammar": Unsupported(_GUIDED),
    "guided_json_object": Unsupported(_GUIDED, (False,)),
    "guided_decoding_backend": Unsupported(_GUIDED),
    "guided_whitespace_pattern": Unsupported(_GUIDED),
    "json_schema": Unsupported(_GUIDED),
    "grammar": Unsupported(_GUIDED, ("",)),
    "regex": Unsupported(_GUIDED, ("",)),
    "ebnf": Unsupported(_GUIDED, ("",)),
    "return_tokens_as_token_ids": Unsupported(_OUTPUT, (False,)),
    "return_token_ids": Unsupported(_OUTPUT, (False,)),
    "thinking_token_budget": Unsupported("reasoning is not handled apart from text"),
    "lora_path": Unsupported("adapters are chosen by the operator through the model's name"),
    "prompt_embeds": Unsupported(_AUDIO),
    "mm_processor_kwargs": Unsupported(_AUDIO, ({},)),
    "kv_transfer_params": Unsupported(_TRANSFER, ({},)),
    "vllm_xargs": Unsupported(_TRANSFER, ({},)),
    "session_params": Unsupported(_TRANSFER, ({},)),
}

CHAT: Mapping[str, Unsupported] = {
    **_BOTH,
    "echo": Unsupported("a chat's answer is a message of its own", (False,)),
    "functions": Unsupported(_TOOLS, ([],)),
    "function_call": Unsupported(_TOOLS, ("none", "auto")),
    "modalities": Unsupported(_AUDIO, (["text"], [])),
    "audio": Unsupported(_AUDIO),
    "prediction": Unsupported("predicted output is not implemented; leave it out, the answer is the same"),
    "reasoning_effort": Unsupported("reasoning effort cannot be set", ("none",)),
    "reasoning": Unsupported("reasoning effort cannot be set", ({},)),
    "thinking": Unsupported("reasoning effort cannot be set", ({"type": "disabled"},)),
    "include_reasoning": Unsupported("reasoning is not handled apart from text", (True,)),
    "separate_reasoning": Unsupported("reasoning is not handled apart from text", (False,)),
    "verbosity": Unsupported("verbosity cannot be set; ask for it in a message", ("medium",)),
    "web_search_options": Unsupported("there is no web search"),
    "moderation": Unsupported("there is no moderation of answers"),
    "chat_template": Unsupported(_TEMPLATE),
    "chat_template_kwargs": Unsupported(_TEMPLATE, ({},)),
    "documents": Unsupported(_TEMPLATE, ([],)),
    "add_generation_prompt": Unsupported(_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(_TEMPLATE, (False,)),
    "prompt": Unsupported("a chat takes 'messages'; send 'prompt' to /v1/completions"),
}

UNRANKED: Mapping[str, Unsupported] = {
    "best_of": Unsupported("only beam search ranks a chat's answers (use_beam_search: true); use 'n'", (1,))
}
"""Of chats without beam search."""

COMPLETION: Mapping[str, Unsupported] = {
    **_BOTH,
    "suffix": Unsupported("insertion is not implemented", ("",)),
    "messages": Unsupported("completions take 'prompt'; send 'messages' to /v1/chat/completions"),
    "top_logprobs": Unsupported("completions take the number of alternatives in 'logprobs'"),
}
