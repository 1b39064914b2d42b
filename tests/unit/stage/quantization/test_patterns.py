"""Expressions of a configuration: the answers of ``re.match``, in linear time, or one clear error."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import ModelError
from swarm.stage.quantization.patterns import compile_pattern, is_match

# Expressions of published configurations and of the tools' documentation.
PUBLISHED = [
    ".*lm_head",
    ".*mlp.gate$",
    ".*attn.*",
    r".*self_attn\.(q|k|v|o)_proj$",
    r".*\.18\..*(?:gate|up|down)_proj.*",
    r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
    r"^model\.layers\.(?:[0-9]|1[0-5])\..*",
    r".*\bmlp\b",
    "vision_tower.*",
    r".*experts\.\d+\..*",
    r".*layers\.[^.]+\.mlp",
    "",
    "a{2,3}b?",
    r"(?P<kind>q|k)_proj\Z",
    r"\w+\.\W",
    "(a*)*b",
    r"\Bead",
    ".*?head",
]
NAMES = [
    "lm_head",
    "model.lm_head",
    "model.layers.3.mlp.gate",
    "model.layers.18.mlp.gate_proj",
    "model.layers.18.self_attn.q_proj",
    "model.layers.5.self_attn.qkv_proj",
    "model.layers.11.mlp.experts.31.down_proj",
    "vision_tower.blocks.0",
    "aaab",
    "aab",
    "mlp",
    "q_proj",
    "q_projx",
    "a.b",
    "a..",
    "",
    "ein größerer name",
]


@pytest.mark.parametrize("text", PUBLISHED)
def test_answers_are_those_of_re(text: str) -> None:
    for name in NAMES:
        assert is_match(text, name) == bool(re.match(text, name)), name


PIECES = st.sampled_from(["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", r"\w", "(a|b.)", "(?:ab)", "^", "$", r"\b", "1"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "*?"])


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.tuples(PIECES, REPEATS), max_size=5), name=st.text("ab.1_", max_size=8), nested=st.booleans())
def test_answers_are_those_of_re_for_any_expression(pieces: list[tuple[str, str]], name: str, nested: bool) -> None:
    text = "".join(piece + (repeat if piece not in ("^", "$", r"\b") else "") for piece, repeat in pieces)
    if nested:
        text = f"({text})*a"
    assert is_match(text, name) == bool(re.match(text, name))


@pytest.mark.parametrize("text", ["(a+)+$", "(a|aa)+$", "(.*)*x", ".*.*.*.*.*.*.*.*.*x", "(a?){200}" + "a{200}$"])
def test_no_expression_takes_exponential_time(text: str) -> None:
    began = time.process_time()
    assert not is_match(text, "a" * 150 + "!")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (r"(a)\1", "with groupref, which is not supported; use literals, .* or name the modules"),
        ("(?!a).*", "with assert not"),
        ("a(?=b)", "with assert"),
        ("(?i)head", "with flags"),
        ("(?i:head)", "with flags"),
        ("(?>a)b", "with atomic group"),
        ("(", "invalid pattern"),
        ("(a{1000}){1000}", "too many repeats"),
        ("a" * 2000, "2000 letters"),
        ("(" * 900 + ")" * 900, "letters"),
    ],
)
def test_other_expressions_are_refused_by_name_with_a_remedy(text: str, why: str) -> None:
    with pytest.raises(ModelError, match=why.replace("(", r"\(")) as error:
        compile_pattern(text)
    assert repr(text) in str(error.value) or len(text) > 1024


def test_absurd_names_are_refused() -> None:
    with pytest.raises(ModelError, match="a name of 5000 letters"):
        is_match(".*", "a" * 5000)
