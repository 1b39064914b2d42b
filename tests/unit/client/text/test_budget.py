"""A chat template that asks for too much is refused before it has it."""

from __future__ import annotations

import resource
import time
from collections import deque

import pytest

from swarm.client.text.budget import TemplateBudget, TemplateTimeout
from swarm.client.text.template import MAX_SOURCE
from swarm.client.text.tokenizer import ChatRendering, TemplateTooSlow, TextModel
from swarm.errors import InvalidRequest, ModelError
from tests.integration.fake_broker import tokenizer_files

USER = [{"role": "user", "content": "x"}]
A_MOMENT = ChatRendering(time_s=0.2)


def model(template: str) -> TextModel:
    loaded = TextModel.load({**tokenizer_files(), "chat_template.jinja": template.encode()})
    assert loaded is not None
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "{% set r = range(4000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",  # without a call in it
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
)
def test_a_template_has_its_time(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(TemplateTooSlow, match=r"longer than 0\.2 s"):
        model(template).encode_chat(USER, how=A_MOMENT)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}" + "a" * 2000 + "{% endfor %}",
        "{% for i in range(99999) %}{{ 'ab' * 500 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'ab' * 500 }}{% endfor %}{% endset %}{{ x | length }}",
        "{{ ('a' * 10**9) | length }}",
        "{{ ([1] * 10**9) | length }}",
        "{{ (10**10**7) | length }}",
        "{{ 10**60 * 10**60 ** 60 }}",
        "{% set ns = namespace(a='a' * 16) %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='a' * 16) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set l = ['a' * 100000] * 100000 %}{{ l | join | length }}{{ l | string | length }}",
        "{% set l = ['a' * 100000] * 100000 %}{{ ''.join(l) | length }}",
        "{% set l = ['a' * 100000] * 100000 %}{{ l | tojson | length }}",
        "{{ (['a'] * 90000) | map('replace', 'a', 'b' * 100000) | join | length }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) | length }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
        "{{ 'a' | center(10**9) | length }}",
        "{{ 'a'.ljust(10**9) | length }}",
        "{{ ('\t' * 100000).expandtabs(9999) | length }}",
        "{{ ('\n' * 100000) | indent(9999) | length }}",
        "{{ ('%9999999999d' % 1) | length }}",
        "{{ ('%*d' % (10**9, 1)) | length }}",
        "{{ '{:>999999999}'.format(1) | length }}",
        "{{ ('{:>9999}' * 10000).format(1) | length }}",
        "{{ '%999999999d' | format(1) | length }}",
        "{{ 'a'.translate({97: 'b' * 100000}) }}",
        "{{ strftime_now('%Y' * 10**5) | length }}",
        "{{ range(10**9) | length }}",
        "{{ lipsum(n=10**6) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    ],
)
def test_a_template_makes_nothing_too_large(template: str) -> None:
    """Also in one step, which no limit of time interrupts; each is the client's error, if it is one of anybody."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(InvalidRequest, match="refuses the conversation"):
        model(template).encode_chat(USER)
    assert time.thread_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_nothing_is_computed_when_a_template_is_loaded() -> None:
    """Jinja folds constants then."""
    began = time.thread_time()
    model("{{ 'a' * 10**9 }}{{ 10**10**7 }}{{ 'a' | center(10**9) }}{{ 'a' ~ 'b' * 10**9 }}")
    assert time.thread_time() - began < 5


def test_a_template_that_is_too_long_or_too_deep_is_refused_at_once() -> None:
    with pytest.raises(ModelError, match="at most"):
        model("a" * (MAX_SOURCE + 1))
    with pytest.raises(ModelError, match="can't be read"):
        model("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")


def test_ordinary_templates_have_room() -> None:
    """For long conversations, for numbers above the widths that are allowed, for formats."""
    template = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim + '\n' }}{% endfor %}{{ 123456 | default(99999) }}"
        "{{ '%05.1f' % 3.14159 }}{{ '{:>8}'.format('x') }}{{ 'abc' | center(9) }}{{ [1, 2] | join('-') }}"
        "{{ ', '.join(messages | map(attribute='role') | unique) }}{{ 3 * 'ab' }}{{ 2 ** 10 }}{{ 'a' ~ none ~ [1] }}"
    )
    text = model(template).render_chat([{"role": "user", "content": "word " * 100}] * 16_000)
    assert text.endswith("123456003.1       x   abc   1-2userababab1024aNone[1]")


def test_time_is_that_of_a_processor() -> None:
    """A machine that is busy refuses nothing."""
    budget = TemplateBudget(1, time_s=60.0)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        budget.tick()
    late = TemplateBudget(1, time_s=0.0)
    with pytest.raises(TemplateTimeout):
        deque((late.tick() for _ in range(200)), maxlen=0)
