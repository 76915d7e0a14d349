"""Chat templates by name, in Jinja as transformers reads it. `generation` marks what an assistant says.

A `generation` block holds the text of an answer and the end of its turn, which a model must learn to write.
"""

TOOL_CALLS = """
{%- macro calls(message) %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- macro tool_list() %}
{{- '# Tools\\n\\nYou may call these functions, each call as <tool_call>\\n{\"name\": ..., ' }}
{{- '\"arguments\": ...}\\n</tool_call>:\\n' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{%- endmacro %}
"""

# OpenAI's ChatML, as Qwen's models have it.
CHATML = (
    TOOL_CALLS
    + """
{%- if tools and messages[0].role != 'system' %}
{{- '<|im_start|>system\\n' + tool_list() + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content or '' }}{{- calls(message) + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message.content }}
{%- if tools and loop.first and message.role == 'system' %}{{- '\\n\\n' + tool_list() }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)

# Llama 3's, with the tools listed as in ChatML and without its lines of dates.
LLAMA3 = (
    TOOL_CALLS
    + """
{{- bos_token or '' }}
{%- if tools and messages[0].role != 'system' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + tool_list() + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- (message.content or '') | trim }}{{- calls(message) + '<|eot_id|>' }}
{%- endgeneration %}
{%- else %}
{{- message.content | trim }}
{%- if tools and loop.first and message.role == 'system' %}{{- '\\n\\n' + tool_list() }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
)

# Zephyr's, whose turns end with the end-of-document token. It has no tools.
ZEPHYR = """
{%- if tools %}{{- raise_exception('this template has no tools') }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- raise_exception('this template has no tools') }}{%- endif %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content + eos_token }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message.content + eos_token + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

# For a tokenizer that reserves nothing but the end of a document, such as that of `make demo`.
PLAIN = """
{%- if tools %}{{- raise_exception('this template has no tools') }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- raise_exception('this template has no tools') }}{%- endif %}
{%- if message.role == 'assistant' %}
{{- 'Assistant:\\n' }}
{%- generation %}
{{- message.content + eos_token }}
{%- endgeneration %}
{%- else %}
{{- message.role | capitalize + ':\\n' + message.content + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:\\n' }}{%- endif %}
"""

NAMED = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR, "plain": PLAIN}
