"""Chat templates: what transformers makes of them, or a sentence within the limits, whatever they do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa import templates
from gsa.errors import GSAError
from tests.examples import examples
from tests.infer.talking import CHATML

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Who's <there>?\n"},
    {"role": "assistant", "content": "naïve 😀 {{ no }}"},
    {"role": "user", "content": "…"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + date_string + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls|length != 1 %}
        {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {% generation %}{{- '<|im_start|>' + message.role + '\\n' + content }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
    {%- if loop.index0 > ns.last_query_index %}{%- break %}{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
"""
MISTRAL = """{%- set loop_messages = messages[1:] if messages[0]["role"] == "system" else messages %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + (message | tojson(indent=2)) + dict(a=1)|tojson + "[/INST]" }}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""


def by_transformers(template: str, messages: list[dict[str, str]]) -> str:
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    return render([messages], chat_template=template, add_generation_prompt=True, **NAMES)[0][0]


@pytest.mark.parametrize("template", [CHATML, LLAMA, QWEN, MISTRAL], ids=["chatml", "llama", "qwen", "mistral"])
def test_usual_templates_give_what_transformers_gives(template: str) -> None:
    assert templates.render(template, MESSAGES, NAMES) == by_transformers(template, MESSAGES)


HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000d}'.format(1) }}",
    "{{ range(10 ** 9) | list }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ (10 ** (10 ** 8)) | string | length }}",
    "{{ 'x'.ljust(10 ** 10) }}{{ 'x'.expandtabs(10 ** 10) }}",
    "{{ '\\t'.expandtabs(10 ** 9) }}",
    "{{ lipsum(n=10 ** 9) }}",
    "{{ 'x' * 10 ** 8 }}",
    "{{ messages[0].content * 10 ** 8 }}",
    "{% set a = [] %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{{ (['x' * 1000] * 10 ** 6) | join }}",
    "{% if " + "(" * 3000 + "1" + ")" * 3000 + " %}{% endif %}",
    "{{ " + "[" * 500 + "]" * 500 + " }}",
    "{{ '" + "a" * 30 + "' | wordwrap(0) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% set n = namespace(__class__=1) %}{{ n }}",
    "{% set n = namespace() %}{% set n._x = 1 %}",
]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.4)


@pytest.mark.usefixtures("hurried")
def test_a_hostile_template_is_an_error_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for template in HOSTILE:
        with pytest.raises(GSAError, match=r"(?s)^.{10,1100}$") as raised:
            templates.render(template, MESSAGES, NAMES)
        if template in HOSTILE[-3:]:  # which take no time: it is the sandbox that refuses them
            assert "seconds" not in str(raised.value)
        assert "Traceback" not in str(raised.value), template
    monkeypatch.undo()
    assert templates.render(CHATML, MESSAGES, NAMES) == by_transformers(CHATML, MESSAGES)


def test_a_jinja_that_templates_can_break_out_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    with pytest.raises(GSAError, match=r"templates can break out of jinja2 3.1.5; expected 3.1.6 or newer"):
        templates._compiled("a template that nobody has compiled")


def test_a_long_message_is_no_mistake_of_the_template() -> None:
    messages = [{"role": "user", "content": "xyz" * 2**23}]
    assert len(templates.render("{{ messages[0].content }}", messages, {})) == 3 * 2**23


def test_threads_and_interruptions_get_their_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [[{"role": "user", "content": str(i)}] for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda messages: templates.render(CHATML, messages, {}), asked)]
    assert found == [by_transformers(CHATML, messages) for messages in asked]
    assert templates._helper is not None
    connection = templates._helper[1].connection
    monkeypatch.setattr(type(connection), "recv_bytes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        templates.render(CHATML, asked[0], {})
    monkeypatch.undo()
    assert templates.render(CHATML, asked[1], {}) == found[1]  # and not the answer that was left
    assert threading.active_count() < 20


PIECES = st.sampled_from(
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if loop is defined and loop.first %}",
        "{% endif %}",
        "{% set n = namespace(x='ab') %}",
        "{% set n.x = n.x * 3 %}",
        "{{ n.x }}",
        "{{ messages | tojson }}",
        "{{ 'a' * 300 | int }}",
        "{% for i in range(200) %}",
        "{% macro m(x) %}",
        "{% endmacro %}",
        "{{ m(1) }}",
        "{{ 2 ** 9 ** 9 }}",
        "{{ '%99999d' % 3 }}",
        "{{ x.__class__ }}",
        "{% generation %}",
        "{% endgeneration %}",
        "{{ raise_exception('no') }}",
        "{% break %}",
        "text",
        "{#",
        "#}",
    ]
)


@pytest.mark.filterwarnings("ignore")
@examples(60)
@given(st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join))
def test_any_template_gives_a_text_or_a_sentence(template: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "SECONDS", 0.4)
        try:
            said = templates.render(template, MESSAGES[:2], NAMES)
        except GSAError as error:
            said = str(error)
        assert len(said) < 10**8
        assert "Traceback" not in said
