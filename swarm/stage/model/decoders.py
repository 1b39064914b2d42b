"""Order of the modules of base models whose own forward builds masks or embeds positions by itself.

Such a base model's forward is replaced by one that runs its modules in this order, by the current pass: its class may
list them otherwise. Of encoders that can also continue a text (BERT's), it runs the decoder that ``is_decoder`` makes
of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from swarm.stage.attention.passes import current_pass


@dataclass(frozen=True, slots=True)
class Decoder:
    """Names of a base model's modules, in the order in which they run. Models may lack some of them."""

    embed: str
    layers: str = "h"
    positions: str = ""  # the module that embeds positions, whose result is added
    after_embed: tuple[str, ...] = ()  # modules between the embedding of tokens and that sum
    after_layers: tuple[str, ...] = ("ln_f",)
    arguments: tuple[str, ...] = ()  # of layers, besides hidden states; None is given for a name without a value here
    holder: str = ""  # the module within the base model that has all these
    has_positions: bool = False  # whether the embedding of tokens also embeds positions
    has_pad_position: bool = False  # whether these begin after the number of the token for padding


def _encoder(*after_layers: str, after_embed: tuple[str, ...] = (), has_pad_position: bool = False) -> Decoder:
    return Decoder(
        *("embeddings", "encoder.layer", "", after_embed, after_layers),
        has_positions=True,
        has_pad_position=has_pad_position,
    )


# Encoders that continue a text if ``is_decoder`` says so.
_ENCODERS = {
    "BertGenerationEncoder": _encoder(),
    "BertModel": _encoder(),
    "CamembertModel": _encoder(has_pad_position=True),
    "Data2VecTextModel": _encoder(has_pad_position=True),
    "ElectraModel": _encoder(after_embed=("embeddings_project",)),
    "ErnieModel": _encoder(),
    "MegatronBertModel": _encoder("encoder.ln"),
    "RemBertModel": _encoder(after_embed=("encoder.embedding_hidden_mapping_in",)),
    "RobertaModel": _encoder(has_pad_position=True),
    "RobertaPreLayerNormModel": _encoder("LayerNorm", has_pad_position=True),
    "XLMRobertaModel": _encoder(has_pad_position=True),
    "XLMRobertaXLModel": _encoder("encoder.LayerNorm", has_pad_position=True),
}
_DECODERS = _ENCODERS | {
    "BloomModel": Decoder(
        "word_embeddings", after_embed=("word_embeddings_layernorm",), arguments=("alibi", "attention_mask")
    ),
    "BioGptModel": Decoder("embed_tokens", "layers", "embed_positions", (), ("layer_norm",)),
    "CTRLModel": Decoder("w", "h", "swarm_positions", ("swarm_scale",), ("layernorm",)),
    "CodeGenModel": Decoder("wte", arguments=("position_ids",)),
    "FalconModel": Decoder("word_embeddings", arguments=("alibi", "attention_mask", "position_embeddings")),
    "GPT2Model": Decoder("wte", "h", "wpe"),
    "GPTBigCodeModel": Decoder("wte", "h", "wpe"),
    "GPTJModel": Decoder("wte", arguments=("position_ids",)),
    "GPTNeoModel": Decoder("wte", "h", "wpe"),
    "GPTNeoXJapaneseModel": Decoder(
        "embed_in", "layers", "", (), ("final_layer_norm",), ("position_ids", "position_embeddings")
    ),
    "MptModel": Decoder("wte", "blocks", "", (), ("norm_f",), ("position_bias", "attention_mask")),
    "OPTModel": Decoder(
        "embed_tokens",
        "layers",
        "embed_positions",
        ("project_in",),
        ("final_layer_norm", "project_out"),
        holder="decoder",
    ),
    "RecurrentGemmaModel": Decoder(
        "embed_tokens", "layers", "", ("swarm_scale",), ("final_norm",), ("position_ids", "attention_mask")
    ),
    "RwkvModel": Decoder("embeddings", "blocks", "", (), ("ln_out",)),
    "OpenAIGPTModel": Decoder("tokens_embed", "h", "positions_embed", (), ()),
    "xLSTMModel": Decoder("embeddings", "blocks", "", (), ("out_norm",)),
    "XGLMModel": Decoder("embed_tokens", "layers", "embed_positions", (), ("layer_norm",)),
}
# Kinds that call transformers' table of attention functions, but do not declare it.
_PLUGGABLE = frozenset({"BioGptModel", "StableLmModel"})


def is_replaced(model: Any) -> bool:
    """Whether this kind of model attends by our function although transformers does not declare that it can."""
    kind = type(find_base(model)[0]).__name__
    return kind in _DECODERS or kind in _PLUGGABLE


def find_base(model: Any) -> tuple[Any, str]:
    """Return the model without its head, and its name; the model itself if it has no head."""
    base, name = model.base_model, model.base_model_prefix
    if base is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        return model.model, "model"  # Llama 4 names another one
    return base, name


def count_layers(config: Any) -> int:
    """Return how many layers a model with this configuration has. LongCat's attentions count as layers of its cache."""
    num: int = config.num_layers if config.model_type == "longcat_flash" else config.num_hidden_layers
    return num


def named_parts(base: nn.Module) -> dict[str, nn.Module]:
    """Return a base model's modules by name: its children, and instead of the one that has the layers, that one's."""
    decoder, parts = find_decoder(base), dict[str, nn.Module]()
    inner = "" if decoder is None else decoder.layers.rpartition(".")[0]
    for name, child in base.named_children():
        if name == inner:
            parts |= {f"{name}.{leaf}": part for leaf, part in child.named_children()}
        else:
            parts[name] = child
    return parts


def find_decoder(base: nn.Module) -> Decoder | None:
    """Return the order of a base model's modules, if it is of these kinds."""
    return _DECODERS.get(type(base).__name__)


def run_decoder(
    self: Any,
    input_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    **_: object,
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Run a base model. A stage after the first gets the hidden states of the layer before as ``inputs_embeds``."""
    decoder, positions = self.swarm_decoder, current_pass().positions
    hidden = inputs_embeds
    if input_ids is not None:
        hidden = _run_parts(self, decoder.after_embed, _embed(self, decoder, input_ids, positions))
        if decoder.positions:
            hidden = hidden + _embed_positions(getattr(self, decoder.positions), positions).to(hidden.dtype)
    assert hidden is not None, "a stage has tokens or hidden states"
    given: dict[str, Any] = {"position_ids": positions}
    if "position_embeddings" in decoder.arguments:
        given["position_embeddings"] = self.rotary_emb(hidden, positions)
    arguments = {name: given.get(name) for name in decoder.arguments}
    for layer in self.get_submodule(decoder.layers):
        output = layer(hidden, **arguments)
        hidden = output if isinstance(output, torch.Tensor) else output[0]
    result = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=_run_parts(self, decoder.after_layers, hidden))
    result.state = result.cache_params = None  # the heads of RWKV and xLSTM read them
    return result


def _run_parts(self: nn.Module, names: tuple[str, ...], hidden: torch.Tensor) -> torch.Tensor:
    for name in names:
        part: Any = self
        for leaf in name.split("."):
            part = getattr(part, leaf, None)
        hidden = hidden if part is None else part(hidden)
    return hidden


def _embed(self: Any, decoder: Decoder, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    part = getattr(self, decoder.embed)
    if not decoder.has_positions:
        embedded: torch.Tensor = part(ids)
    else:
        first = part.padding_idx + 1 if decoder.has_pad_position else 0
        embedded = part(input_ids=ids, position_ids=positions + first)
    return embedded


def _embed_positions(part: Any, positions: torch.Tensor) -> torch.Tensor:
    """Look up positions. Some tables begin with rows that stand for none."""
    table = part.weights if hasattr(part, "weights") else part.weight
    rows: torch.Tensor = table.to(positions.device)[positions + getattr(part, "offset", 0)]
    return rows
