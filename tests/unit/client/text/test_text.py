"""The model's own tokenizer and chat template."""

from __future__ import annotations

import json

import pytest

from swarm.client.text.tokenizer import ChatRendering, TextModel
from swarm.errors import InvalidRequest, ModelError
from tests.integration.fake_broker import tokenizer_files

USER = {"role": "user", "content": "hi"}


def model(template: str | None = None, **config: object) -> TextModel:
    files = tokenizer_files()
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    if config:
        files["tokenizer_config.json"] = json.dumps(config).encode()
    loaded = TextModel.load(files)
    assert loaded is not None
    return loaded


def test_encoding_adds_what_the_model_expects() -> None:
    """A plain prompt gets the special tokens around it; a template writes its own."""
    assert model().encode("hello")[0] == 0
    assert model().encode("hello", add_special_tokens=False)[0] != 0
    assert model().encode_chat([USER])[:1] == (0,)
    assert list(model().encode_chat([USER])).count(0) == 2  # as often as the template says


@pytest.mark.parametrize(("text", "why"), [("", "empty"), ("a\ud800b", "not valid Unicode")])
def test_text_that_is_no_prompt(text: str, why: str) -> None:
    """One clear error each."""
    with pytest.raises(InvalidRequest, match=why):
        model().encode(text)


def test_truncation_and_padding_are_off() -> None:
    """Settings that a training left in the file would cut prompts in silence."""
    files = tokenizer_files()
    settings = json.loads(files["tokenizer.json"])
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    files["tokenizer.json"] = json.dumps(settings).encode()
    loaded = TextModel.load(files)
    assert loaded is not None
    assert len(loaded.encode("x" * 50)) == 51


def test_broken_files_are_named() -> None:
    """The error says which file."""
    assert TextModel.load({}) is None
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        TextModel.load({"tokenizer.json": b"{}"})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        TextModel.load({**tokenizer_files(), "tokenizer_config.json": b"{"})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json must be a JSON object"):
        TextModel.load({**tokenizer_files(), "tokenizer_config.json": b"[]"})
    with pytest.raises(ModelError, match="the chat template can't be read"):
        model("{% if %}")


def test_a_tokenizer_that_panics_when_it_is_used_is_refused_when_it_is_loaded() -> None:
    """What surrounds a text names a token that is described nowhere. The library panics, which is no Exception."""
    files = tokenizer_files()
    settings = json.loads(files["tokenizer.json"])
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": "nowhere", "type_id": 0}}, text]
    processor = {"type": "TemplateProcessing", "single": single, "pair": [text], "special_tokens": {}}
    settings["post_processor"] = processor
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be"):
        TextModel.load(files | {"tokenizer.json": json.dumps(settings).encode()})


def test_a_template_file_goes_before_the_configuration() -> None:
    """And of several named templates in the configuration, the default one counts."""
    assert model("{{ messages[0].content }}!").render_chat([USER]) == "hi!"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert model(chat_template=named).render_chat([USER]) == "yes"


def test_the_template_of_a_processor_goes_before_the_tokenizers() -> None:
    """Older multimodal checkpoints have it in a file of its own, next to one for text, or to none."""
    files = tokenizer_files() | {"chat_template.json": json.dumps({"chat_template": "whole"}).encode()}
    for more, expected in (({}, "whole"), ({"chat_template.jinja": b"newer"}, "newer")):
        loaded = TextModel.load(files | more)
        assert loaded is not None
        assert loaded.render_chat([USER]) == expected
    with pytest.raises(ModelError, match=r"chat_template\.json is not valid JSON"):
        TextModel.load(files | {"chat_template.json": b"{"})


# As in LLaVA's and SmolVLM's checkpoints: the letters of a text are no parts, so nothing of it would be shown.
PARTS = [
    "{% for m in messages %}{{ m.role }}:{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}|{% endfor %}",
    """{% for m in messages %}{{ m["role"] }}:{% for part in m["content"] %}{% if part["type"] == "image" %}<image>"""
    """{% elif part["type"] == "text" %}{{ part["text"] }}{% endif %}{% endfor %}|{% endfor %}""",
]


@pytest.mark.parametrize("template", PARTS)
def test_a_template_that_shows_parts_only_gets_parts(template: str) -> None:
    loaded = model(template)
    chat = [{"role": "system", "content": "be short"}, USER, {"role": "assistant", "content": ""}]
    assert loaded.render_chat(chat) == "system:be short|user:hi|assistant:|"
    assert loaded.render_chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == "user:hi|"
    half = [USER, {"role": "assistant", "content": "I"}]
    ids = loaded.encode_chat(half, how=ChatRendering(continues=True))
    assert loaded.decode_all(ids).endswith("assistant:I")


def test_a_template_that_shows_a_text_gets_it() -> None:
    """Whether it could take parts, too, or fails at both."""
    both = "{{ messages[0].content if messages[0].content is string else messages[0].content[0]['text'] ~ '?' }}"
    assert model(both).render_chat([USER]) == "hi"
    assert model("{{ messages[0].content ~ {'text': 1}['text'] }}").render_chat([USER]) == "hi1"
    assert not model("{{ raise_exception('text') }}").takes_parts


def test_templates_see_what_transformers_shows_them() -> None:
    """Special tokens, the generation prompt, loop controls, trimmed blocks, plain JSON, generation marks."""
    template = (
        "{%- for m in messages %}\n  {% if m.role == 'skip' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
        "{% generation %}{{ {'a': '<b>'} | tojson }}{% endgeneration %}{{ bos_token }}{{ eos_token }}"
        "{{ add_generation_prompt }}{{ strftime_now('%%') }}{{ dict(a=1).a }}"
        "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"
    )
    loaded = model(template, bos_token="<s>", eos_token={"content": "</s>"})
    said = loaded.render_chat([{"role": "skip", "content": "?"}, USER])
    assert said == 'hi{"a": "<b>"}<s></s>True%12'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set ns = namespace(_x=1) %}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_that_refuse_or_misbehave(template: str) -> None:
    """A template's own complaint, its mistakes and its attempts to climb out of the sandbox: one kind of error."""
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        model(template).render_chat([USER])


def test_conversations_that_are_none() -> None:
    """Empty ones, messages without a role, and models without a template."""
    with pytest.raises(InvalidRequest, match="conversation is empty"):
        model().render_chat([])
    with pytest.raises(InvalidRequest, match=r"messages\[1\] must be a mapping"):
        model().render_chat([USER, {"content": "x"}])
    with pytest.raises(InvalidRequest, match="no chat template"):
        model(bos_token="<s>").render_chat([USER])


def test_a_model_may_have_a_template_for_tools() -> None:
    """It is taken when tools are given, and it is the one that is looked at for how calls are written."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    both = model(chat_template=named)
    assert both.render_chat([USER]) == "plain"
    assert both.render_chat([USER], tools=[{}]) == "tools 1"
    assert both.render_chat([USER], tools=[]) == "plain"
    assert both.template_source == "tools {{ tools | length }}"
    assert model("one").template_source == "one"
    assert model("one").render_chat([USER], tools=[{}]) == "one"
