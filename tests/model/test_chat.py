"""The prompt of a chat model, as its own template makes it."""

import importlib.util
import json

import pytest

from jaxdt.model.chat import chat_prompt
from jaxdt.run.errors import BadInput

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("jinja2"), reason="the extra hf is not installed")

CHATML = """{% for message in messages %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
    {{- bos_token if loop.first else '' }}<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
STRICT = "{{ raise_exception('only users speak') }}"
EXPECTED = "<s><|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n"


def origin(folder, template=None, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("message", ["Who are you?", "{{ 7 * 7 }} {% for x in messages %}"])
def test_a_message_stands_in_the_template_as_it_is(tmp_path, message):
    assert chat_prompt(origin(tmp_path, CHATML), message) == EXPECTED.format(message)


def test_older_files_hold_the_template_in_the_config_of_the_tokenizer(tmp_path):
    bos = {"bos_token": {"content": "<s>", "lstrip": False}}
    assert chat_prompt(origin(tmp_path, chat_template=CHATML, **bos), "x") == EXPECTED.format("x")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert chat_prompt(origin(tmp_path, chat_template=named), "x") == EXPECTED.format("x")


@pytest.mark.parametrize(
    "template", [STRICT, "{% if %}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 + 'a' }}"]
)
def test_a_template_that_cannot_be_filled_is_one_line(tmp_path, template):
    with pytest.raises(
        BadInput, match=r"its chat template cannot be (filled|read) \(.+\), (use --prompt w|expected one)"
    ):
        chat_prompt(origin(tmp_path, template), "x")


def test_a_model_without_a_template_does_not_chat(tmp_path):
    with pytest.raises(BadInput, match=r"^--chat: .+ has no chat template, expected a model that was made to chat$"):
        chat_prompt(origin(tmp_path), "x")


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": [{"name": "x"}, "y"]}'])
def test_damaged_files_are_one_line(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadInput, match=r"cannot be read|expected an object|has no chat template"):
        chat_prompt(tmp_path, "x")
