"""Names of a text tower's tensors where layers for images are left out."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.stage.model.text_tower import choose_names, image_layers, number_layers


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (
            {
                "model_type": "mllama",
                "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [4, 1]},
            },
            [1, 4],
        ),
        ({"model_type": "mllama_text_model", "cross_attention_layers": []}, []),
        ({"model_type": "mllama_text_model"}, [3, 8, 13, 18, 23, 28, 33, 38]),
        ({"model_type": "llama", "cross_attention_layers": [1]}, []),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, []),
    ],
)
def test_layers_for_images_are_those_of_the_configuration(config: dict[str, Any], layers: list[int]) -> None:
    assert image_layers(config) == layers


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_layers_are_counted_without_those_for_images(prefix: str) -> None:
    stored = [*(f"{prefix}layers.{n}.mlp.up_proj.weight" for n in range(6)), f"{prefix}norm.weight", "vision.weight"]
    plain = number_layers(choose_names(stored), [1, 4])
    assert [plain(name) for name in stored] == [
        "model.layers.0.mlp.up_proj.weight",
        None,
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        None,
        "model.layers.3.mlp.up_proj.weight",
        "model.norm.weight",
        None,
    ]
