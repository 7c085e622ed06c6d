"""Chat templates: where they come from, what they can do, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_vocabularies import byte_level_bpe, save_folder, write_json

from eaglejax.errors import CheckpointError, PromptError
from eaglejax.text.chat import ChatTemplate, parse_messages
from eaglejax.text.tokenizer import load_tokenizer

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def loaded(folder: Path, **config):
    return load_tokenizer(save_folder(folder, byte_level_bpe(), {"bos_token": "<|im_start|>", **config}))


def test_ids_of_a_chat_are_those_of_its_text_and_bos_is_not_doubled(tmp_path: Path):
    tokenizer = loaded(tmp_path, chat_template=CHATML)
    text = "<|im_start|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(HI) == text
    ids = tokenizer.apply_chat_template(HI)
    assert ids == tokenizer.encode(text) and ids[:2] == [0, 0] and ids.count(0) == 3
    assert tokenizer.render_chat(HI, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")


def test_where_templates_come_from(tmp_path: Path):
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "default"}]
    assert loaded(tmp_path, chat_template=named).render_chat(HI) == "default"
    assert loaded(tmp_path, chat_template=named[:1]).render_chat(HI) == "tool"
    write_json(tmp_path / "chat_template.json", {"chat_template": "from json"})
    assert loaded(tmp_path, chat_template=named).render_chat(HI) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    tokenizer = loaded(tmp_path, chat_template=named)
    assert tokenizer.render_chat(HI) == "from jinja" and "chat template from chat_template.jinja" in tokenizer.notes
    several = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
    with pytest.raises(CheckpointError, match="none is called default.*found a, b"):
        loaded(tmp_path / "several", chat_template=several)
    with pytest.raises(CheckpointError, match="chat_template: not a chat template"):
        loaded(tmp_path / "number", chat_template=5)


def test_no_template_says_what_to_do(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no chat template.*chat_template.jinja"):
        loaded(tmp_path).apply_chat_template(HI)


def render(source: str, messages=HI, **variables) -> str:
    return ChatTemplate(source, "template", {"eos_token": "</s>"}).render(messages, **variables)


def test_template_language():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"  # trim_blocks and lstrip_blocks
    assert render("{{ {'é': '<'} | tojson }}") == '{"é": "<"}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("x{% generation %}{{ messages[0].content }}{% endgeneration %}y") == "xhiy"
    assert render("{{ strftime_now('%Y') | length }}{{ eos_token }}") == "4</s>"
    assert render("{% if tools %}T{% endif %}{% if thinking %}on{% endif %}", thinking=True) == "on"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}") == "3"


def test_templates_are_untrusted():
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(PromptError, match="SecurityError"):
            render(source, messages=list(HI))


def test_template_errors():
    with pytest.raises(PromptError, match="refuses these messages.*roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CheckpointError, match="template: the chat template does not compile.*line 2"):
        render("\n{% if %}")
    with pytest.raises(PromptError, match="failed on these messages.*UndefinedError"):
        render("{{ nothing.at.all }}")


def test_messages_are_checked():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    checked = parse_messages([{"role": "user", "content": parts, "name": "x"}])
    assert checked == [{"role": "user", "content": "ab", "name": "x"}]
    assert parse_messages([{"role": "assistant", "content": None, "tool_calls": [1]}])[0]["content"] == ""
    image = [{"role": "user", "content": [parts[0], {"type": "image_url", "image_url": "x"}]}]
    for bad, message in (
        (image, r"messages\[0\].content\[1\].*'image_url'"),
        ([*HI, {"content": "x"}], r"messages\[1\].role.*None"),
        ([{"role": "user"}], r"messages\[0\].content.*None"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content.*found 5"),
        (["hi"], r"messages\[0\].*found str"),
        ([], "an empty list"),
        (HI[0], "chat messages are a list"),
    ):
        with pytest.raises(PromptError, match=message):
            parse_messages(bad)
