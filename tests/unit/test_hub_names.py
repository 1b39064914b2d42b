"""Names of models on a hub, and the choice of one of a repository's GGUF models."""

from __future__ import annotations

import pytest

from swarm.errors import ModelError
from swarm.hub.gguf_choice import GgufChoice, choose_model, list_models
from swarm.hub.names import HubName, parse_name

FILES = [
    "README.md",
    "tiny.Q4_0.gguf",
    "tiny.Q4_K_M.gguf",
    "UD/tiny-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD/tiny-UD-Q4_K_XL-00002-of-00002.gguf",
    "tiny-vision-bf16.gguf",
]


def named(text: str) -> HubName:
    name = parse_name(text)
    assert name is not None
    return name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", HubName("a/b")),
        ("a/b.c-GGUF@v1/x", HubName("a/b.c-GGUF", "v1/x")),
        ("a/b:Q4_K_M", HubName("a/b", None, "", "Q4_K_M")),
        ("a/b:q8_0@main", HubName("a/b", "main", "", "q8_0")),
        ("a/b/c.gguf", HubName("a/b", None, "c.gguf")),
        ("a/b/Q8_0/c-00001-of-00002.gguf@main", HubName("a/b", "main", "Q8_0/c-00001-of-00002.gguf")),
        ("a/b/Großes (neu), 7B.Q4_0.gguf", HubName("a/b", None, "Großes (neu), 7B.Q4_0.gguf")),
        ("a/b.gguf", HubName("a/b.gguf")),
    ],
)
def test_a_name_has_a_repository_and_perhaps_a_choice_and_a_revision(text: str, name: HubName) -> None:
    assert parse_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["a", "a/b/c", "./a/b", "/a/b", "a/b@", "a/b:", "a b/c", "a/b/../c.gguf", "a//b.gguf", "a/b/c@d.gguf"]
)
def test_other_texts_are_no_names(text: str) -> None:
    assert parse_name(text) is None


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("tiny-instruct-v0.2.Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Llama-3.2-1B-Instruct-f16.gguf", "F16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("tiny-IQ3_XXS.gguf", "IQ3_XXS"),
        ("tiny-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("Q5_0/model.gguf", "Q5_0"),
        ("tiny-q8_0-f32.gguf", "F32"),
        ("model.gguf", ""),
        ("tinyQ4_0.gguf", ""),
    ],
)
def test_the_name_of_a_file_has_its_quantization(file: str, quantization: str) -> None:
    assert list_models([file]) == [GgufChoice((file,), quantization)]


def test_models_are_files_or_all_parts_of_a_split_one() -> None:
    incomplete = [f"x-Q8_0-{number:05}-of-00003.gguf" for number in (1, 3)]
    others = ["mmproj-f16.gguf", "tiny.imatrix.gguf", "../stolen.gguf", "/a.gguf", "a//b.gguf", "y-00003-of-00002.gguf"]
    models = list_models([*reversed(FILES), *incomplete, *others])
    assert {model.files for model in models} == {(FILES[1],), (FILES[2],), tuple(FILES[3:5]), (FILES[5],)}


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("a/b:Q4_0", FILES[1]),
        ("a/b:q4_k_m", FILES[2]),
        ("a/b:UD-Q4_K_XL", FILES[3]),
        ("a/b:tiny.Q4_0", FILES[1]),
        ("a/b:tiny.Q4_0.gguf", FILES[1]),
        (f"a/b/{FILES[4]}", FILES[3]),
    ],
)
def test_a_name_chooses_by_quantization_or_file(text: str, file: str) -> None:
    assert choose_model(named(text), list_models(FILES)).files[0] == file


CHOICES = "choose one of BF16, Q4_0, Q4_K_M, UD-Q4_K_XL, as in a/b:Q4_K_M"


@pytest.mark.parametrize(
    ("text", "files", "error"),
    [
        ("a/b", FILES, f"a/b has several GGUF models; {CHOICES}"),
        ("a/b:Q2_K", FILES, f"a/b has no GGUF model Q2_K; {CHOICES}"),
        ("a/b/c.gguf", FILES, f"a/b has no GGUF model c.gguf; {CHOICES}"),
        ("a/b:Q2_K", [], "a/b has no complete GGUF model; choose another repository"),
        ("a/b", ["x.gguf", "y.gguf"], "a/b has several GGUF models; choose one of x.gguf, y.gguf, as in a/b/x.gguf"),
        (
            "a/b:F16",
            ["x-f16.gguf", "y-f16.gguf"],
            "a/b:F16 could be each of x-f16.gguf, y-f16.gguf; name one of them as a/b/x-f16.gguf",
        ),
        (
            "a/b@v1",
            ["x-f16.gguf", "y-f16.gguf", "z-f32.gguf"],
            "a/b@v1 has several GGUF models; choose one of F16, F32, as in a/b/x-f16.gguf@v1",
        ),
    ],
)
def test_a_name_without_one_model_gets_the_choices(text: str, files: list[str], error: str) -> None:
    with pytest.raises(ModelError) as raised:
        choose_model(named(text), list_models(files))
    assert str(raised.value) == error
