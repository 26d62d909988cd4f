"""Small chat templates with the mechanics of published ones. None of them is a published template."""

_BEGIN = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
_END = "{{ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
_TOOLS = "{%- if tools %}{%- for t in tools %}{{ t | tojson + '\\n' }}{%- endfor %}{%- endif %}"
# Reads a text or parts, as the macro of GLM, MiniMax and Kimi does.
_VISIBLE = (
    "{%- macro visible(c) %}{%- if c is string %}{{ c }}{%- elif c is iterable and c is not mapping %}"
    "{%- for p in c %}{%- if p.type == 'text' %}{{ p.text }}{%- endif %}{%- endfor %}{%- else %}{{ c }}{%- endif %}"
    "{%- endmacro %}"
)

# Arguments are written by key and value; developer messages are not known; `/nothink` ends a question.
GLM = (
    _VISIBLE
    + "{%- if tools %}<|system|>\n{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}\n{% endfor %}{% endif -%}"
    "{%- for m in messages %}{%- if m.role == 'user' %}<|user|>\n{{ visible(m.content) }}"
    "{{- '/nothink' if enable_thinking is defined and not enable_thinking and not"
    " visible(m.content).endswith('/nothink')"
    " else '' }}{%- elif m.role == 'system' %}<|system|>\n{{ visible(m.content) }}{%- elif m.role == 'assistant' %}"
    "<|assistant|>\n{{ visible(m.content) }}{%- for c in m.tool_calls or [] %}{%- set c = c.function or c %}"
    "<call>{{ c.name }}{%- for k, v in (c.arguments or {}).items() %}<key>{{ k }}</key><value>"
    "{{ v if v is string else v | tojson(ensure_ascii=False) }}</value>{%- endfor %}</call>{%- endfor %}"
    "{%- elif m.role == 'tool' %}<|user|>\n<result>{{ m.content }}</result>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>\n{%- endif %}"
)
# Arguments are joined as text; a call's null content is tested for.
DEEPSEEK = (
    "{%- set ns = namespace(system='') %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.system = ns.system + m.content %}{%- endif %}{%- endfor %}{{ ns.system }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|user|>' + m.content }}{%- endif %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{%- for c in m.tool_calls %}"
    "{{ '<|assistant|><call>' + c['type'] + c['function']['name'] + c['function']['arguments'] + '</call>' }}"
    "{%- endfor %}{{ '<|im_end|>' }}{%- endif %}"
    "{%- if m.role == 'assistant' and m.content is not none %}{{ '<|assistant|>' + m.content.split('</think>')[-1] }}"
    "{{ '<|im_end|>' }}{%- endif %}{%- if m.role == 'tool' %}{{ '<result>' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
# Both forms of arguments; a call is written by its id; parts are read.
KIMI = (
    _VISIBLE + "{%- if tools %}{{ tools | tojson }}{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.get('name') or m.role }}\n"
    "{%- if m.content is not none %}{{ visible(m.content) }}{%- endif %}{%- for c in m.get('tool_calls') or [] %}"
    "<call>{{ c['id'] }}{%- if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}{%- else %}"
    "{{ c['function']['arguments'] | tojson }}{%- endif %}</call>{%- endfor %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
# Arguments of another type than an object are left out without an error; only a first system message is read.
MINIMAX = (
    _VISIBLE + "{%- set rest = messages %}{%- if messages and messages[0].role == 'system' %}<|im_start|>system\n"
    "{{- visible(messages[0].content) }}<|im_end|>\n{%- set rest = messages[1:] %}{%- endif %}"
    "{%- if tools %}{%- for t in tools %}<tool>{{ t.function | tojson | string }}</tool>{%- endfor %}{%- endif %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}<|user|>{{ visible(m.content) }}{%- elif m.role == 'assistant' %}"
    "<|assistant|>{%- if m.content %}{{ visible(m.content) }}{%- endif %}{%- for c in m.tool_calls or [] %}"
    "{%- set c = c.function or c %}<invoke {{ c.name }}>{%- if c.arguments is defined and c.arguments is mapping %}"
    "{%- for k, v in c.arguments | items %}<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>{%- endfor %}"
    "{%- endif %}</invoke>{%- endfor %}<|im_end|>{%- elif m.role == 'tool' %}<result>{{ m.content }}</result>"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
# Roles must take turns; a call is written as JSON as a whole; ids have nine characters; tools come before the question.
MISTRAL = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- if tools is not none and m == users[-1] %}[TOOLS]{%- for t in tools %}"
    "{{ t.function.name }}{{ t.function.parameters | tojson }}{%- endfor %}[/TOOLS]{%- endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{%- elif m.tool_calls is defined and m.tool_calls is not none %}[CALLS]"
    "{%- for c in m.tool_calls %}{%- if not c.id is defined or c.id | length != 9 %}{{ raise_exception('ids have 9') }}"
    "{%- endif %}{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{%- endfor %}<|im_end|>"
    "{%- elif m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{%- elif m.role == 'tool' %}"
    "{{ '[RESULT]' + m.content }}{%- elif m.role == 'system' and loop.first %}{{ m.content }}"
    "{%- else %}{{ raise_exception('unknown role') }}{%- endif %}{%- endfor %}"
)
# An answer of one call is written as a whole; its text is left out.
LLAMA = (
    _TOOLS + _BEGIN + "{%- if m.tool_calls is defined %}{%- if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{%- endif %}{%- set c = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + c.arguments | tojson + '}' }}"
    "{%- else %}{{ m.content | trim }}{%- endif %}" + _END
)
# Thoughts of earlier answers are removed; the generation prompt opens one.
QWEN = (
    _TOOLS + "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}" + _BEGIN + "{%- if m.role == 'assistant' %}"
    "{%- set c = m.content if m.content is string else '' %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in c %}{%- set thought = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{ c }}"
    '{%- for t in m.tool_calls or [] %}{%- set t = t.function or t %}{{ \'<tool_call>{"name": "\' + t.name }}'
    '{{ \'", "arguments": \' }}{{ t.arguments if t.arguments is string else t.arguments | tojson }}'
    "{{ '}</tool_call>' }}{%- endfor %}{%- elif m.role in ['user', 'system', 'tool'] %}{{ m.content }}{%- endif %}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
# Only user and model, a first system message joins the question; anything else is an error.
GEMMA = (
    "{%- set first = '' %}{%- set rest = messages %}{%- if messages[0].role == 'system' %}"
    "{%- set first = (messages[0].content if messages[0].content is string else messages[0].content[0].text) + '\\n' %}"
    "{%- set rest = messages[1:] %}{%- endif %}{%- for m in rest %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}"
    "{%- if m.content is string %}{{ m.content | trim }}{%- else %}{%- for p in m.content %}{{ p.text | trim }}"
    "{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{%- endif %}"
)
# Roles have names of their own; thoughts are under `thinking`.
GPT_OSS = (
    "{%- if tools %}<|im_start|>developer\n"
    "{%- for t in tools %}{{ t.function.name + ': ' + t.function.parameters | tojson }}"
    "{%- endfor %}<|im_end|>{%- endif %}{%- for m in messages %}{%- if m.role in ['system', 'developer'] %}"
    "<|im_start|>developer\n{{ m.content }}<|im_end|>"
    "{%- elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>"
    "{%- elif m.role == 'assistant' %}"
    "{%- if m.thinking is defined and loop.last %}<|im_start|>analysis\n{{ m.thinking }}"
    "<|im_end|>{%- endif %}{%- for c in m.tool_calls or [] %}<|im_start|>call {{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}<|im_end|>{%- endfor %}"
    "{%- if m.content %}<|im_start|>final\n{{ m.content }}<|im_end|>"
    "{%- endif %}{%- elif m.role == 'tool' %}<|im_start|>result\n{{ m.content | tojson }}<|im_end|>"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>{%- endif %}"
)
# Content as parts in every message.
PARTS = _BEGIN + "{%- for p in m.content %}{%- if p.type == 'text' %}{{ p.text }}{%- endif %}{%- endfor %}" + _END
FIRST_PART = _BEGIN + "{{ m['content'][0]['text'] }}" + _END
PARTS_AFTER_SYSTEM = (
    _BEGIN + "{%- if m.role == 'system' %}{{ m.content + '\\n' }}{%- else %}{{ m.content[0].text }}{%- endif %}" + _END
)
# What the model writes is marked.
GENERATION = (
    _BEGIN + "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

PUBLISHED = {
    **{"glm": GLM, "deepseek": DEEPSEEK, "kimi": KIMI, "minimax": MINIMAX, "mistral": MISTRAL, "llama": LLAMA},
    **{"qwen": QWEN, "gpt-oss": GPT_OSS},
}
