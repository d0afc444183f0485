"""Chat templates that call tools as those of published models do, without what is said around."""

from __future__ import annotations

LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('One call at a time!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

_MISTRAL_HEAD = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
"""
_NINE = """\
{%- if call.id | length != 9 %}{{- raise_exception('Call ids have nine characters!') }}{%- endif %}
"""

MISTRAL_LISTED = (
    _MISTRAL_HEAD
    + """\
{%- for message in turns | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Take turns!') }}{%- endif %}
{%- endfor %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
"""
    + _NINE
    + """\
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('Call ids have nine characters!') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
)

_MISTRAL_LATER = (
    _MISTRAL_HEAD
    + """\
{%- if system is defined %}{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- if tools is defined and tools is not none %}
    {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        %REMARK%
        {%- for call in message.get('tool_calls', []) %}
            {{- '[TOOL_CALLS]' + call.function.name }}
            %ID%
            {{- '[ARGS]' + call['function']['arguments'] | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
)
MISTRAL_ARGS = _MISTRAL_LATER.replace("%REMARK%", "{{- message['content'] }}").replace("%ID%", "")
MISTRAL_IDS = _MISTRAL_LATER.replace(
    "%REMARK%", "{%- if not message.get('tool_calls') %}{{- message['content'] }}{%- endif %}"
).replace("%ID%", _NINE + "{{- '[CALL_ID]' + call.id }}")

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls %}
        {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

LLAMA_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
MISTRAL_TOKENS = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"),
)
ALL: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": (LLAMA, LLAMA_TOKENS),
    "mistral-listed": (MISTRAL_LISTED, MISTRAL_TOKENS),
    "mistral-args": (MISTRAL_ARGS, MISTRAL_TOKENS),
    "mistral-ids": (MISTRAL_IDS, MISTRAL_TOKENS),
    "qwen": (QWEN, ()),
}
"""Template and control tokens, by name."""
