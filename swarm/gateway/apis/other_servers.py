"""Fields of vLLM's and llama.cpp's servers in the bodies of chat and completions, where this gateway has the same
ability. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from swarm.gateway.apis.bodies import Body, Number, Texts, json_grammar, response_grammar
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import REST_OF_CONTEXT
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.params import Grammar

# Accepted and ignored: they change nothing about an answer here.
IGNORED_FIELDS = frozenset({
    "cache_prompt",
    "cache_salt",
    "guided_decoding_backend",
    "id_slot",
    "keep_alive",
    "n_cache_reuse",
    "n_keep",
    "return_progress",
    "slot_id",
    "spaces_between_special_tokens",
    "timings_per_token",
})  # fmt: skip

# Samplers that other servers have, with the values that switch them off.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "n_probs": (0,),
    "repeat_last_n": (-1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}

# fields of structured_outputs that hold a grammar, and others that change nothing
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS = ("disable_fallback", "disable_additional_properties", "backend", "_backend")
# fields that hold a grammar, beside response_format
_GRAMMAR_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar")


class SharedBody(Body):
    """Fields of chat and completions in other servers' spelling."""

    response_format: dict[str, Any] | None = None
    structured_outputs: Annotated[dict[str, Any] | None, Field(description="vLLM's response_format.")] = None
    guided_json: Annotated[str | dict[str, Any] | None, Field(description="vLLM's: a JSON schema.")] = None
    guided_regex: Annotated[str | None, Field(description="vLLM's: a regular expression.")] = None
    guided_choice: Annotated[Texts | None, Field(description="vLLM's: the possible answers.")] = None
    guided_grammar: Annotated[str | None, Field(description="vLLM's: a grammar.")] = None
    grammar: Annotated[str | None, Field(description="llama.cpp's: a grammar.")] = None
    repeat_penalty: Annotated[Number | None, Field(description="llama.cpp's repetition_penalty.")] = None
    n_predict: Annotated[int | None, Field(description="llama.cpp's max_tokens; -1: up to the context's end.")] = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="vLLM's: false shows special tokens in the answer's text.")
    ] = None

    def names(self) -> Mapping[str, str]:
        names = dict(self.api_names)
        names["grammar"] = next((name for name in _GRAMMAR_FIELDS if getattr(self, name)), "response_format")
        if self.repetition_penalty is None and self.repeat_penalty is not None:
            names["repetition_penalty"] = "repeat_penalty"
        return names

    def penalty(self) -> float | None:
        """Return the repetition penalty."""
        return self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty


def rest_or_length(n_predict: int | None) -> int | None:
    """Return llama.cpp's number of tokens. Raises ApiError."""
    if n_predict is None or n_predict >= 1:
        return n_predict
    if n_predict == -1:
        return REST_OF_CONTEXT
    raise invalid_field("n_predict", f"must be at least 1, or -1, not {n_predict}")


def check_neutral(body: Body, served: ServedModel) -> frozenset[str]:
    """Return the names of other servers' fields that are ignored. Raises ApiError for a sampler that is switched on,
    unless this gateway ignores unknown fields."""
    extra = body.model_extra or {}
    for name, neutral in NEUTRAL_VALUES.items():
        value = extra.get(name)
        if value is not None and value not in neutral and not served.ignores_unknown_fields:
            raise unsupported_field(name)
    return IGNORED_FIELDS | NEUTRAL_VALUES.keys()


def to_grammar(body: SharedBody) -> Grammar | None:
    """Return the grammar of an answer, whatever the field that gives it. Raises ApiError."""
    grammars = {"response_format": response_grammar(body.response_format)}
    if body.structured_outputs is not None:
        grammars["structured_outputs"] = _structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        grammars["guided_json"] = _schema(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        grammars["guided_regex"] = Grammar("regex", body.guided_regex)
    if body.guided_choice is not None:
        grammars["guided_choice"] = Grammar("choice", json.dumps(body.guided_choice, ensure_ascii=False))
    for name, text in (("guided_grammar", body.guided_grammar), ("grammar", body.grammar)):
        if text:
            grammars[name] = Grammar("ebnf", text)
    given = [name for name, grammar in grammars.items() if grammar is not None]
    if len(given) > 1:
        raise invalid_field(given[1], f"can't be combined with {given[0]}: an answer has one format")
    return grammars[given[0]] if given else None


def _structured_outputs(given: Mapping[str, Any]) -> Grammar | None:
    place = "structured_outputs"
    for name, value in given.items():
        if name not in (*_KINDS, *_OPTIONS) and value:
            raise unsupported_field(f"{place}.{name}")
    kinds = [name for name in _KINDS if given.get(name)]
    if len(kinds) != 1:
        raise invalid_field(place, f"needs one of {', '.join(_KINDS)}")
    kind, value = kinds[0], given[kinds[0]]
    if kind == "json":
        return _schema(value, f"{place}.json")
    if kind == "json_object":
        return Grammar("json_object")
    kind = "ebnf" if kind == "grammar" else kind
    return response_grammar({"type": kind, kind: value}, f"{place}.{kinds[0]}")


def _schema(given: object, place: str) -> Grammar:
    """Return the grammar of a schema, given as an object or as JSON text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise invalid_field(place, f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise invalid_field(place, "must be a JSON schema, which is an object")
    return json_grammar(given)
