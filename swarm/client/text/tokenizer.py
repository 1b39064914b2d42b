"""Text for token ids and back: the model's own tokenizer and chat template, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
from tokenizers import Tokenizer

from swarm.client.text.detokenize import Detokenizer
from swarm.client.text.template import template_environment
from swarm.errors import InvalidRequest, ModelError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
ASSET_FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)

# What Python raises when a template meets a value it was not written for, such as a missing content.
_TEMPLATE_TROUBLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Chat = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of a model. Built from the bytes of its files; safe to share."""

    tokenizer: Tokenizer
    silent: frozenset[int]
    template: jinja2.Template | None
    special: Mapping[str, str]  # bos_token, eos_token, …: what chat templates may mention

    @classmethod
    def load(cls, files: Mapping[str, bytes]) -> TextModel | None:
        """Load from the files by name; None if the model has no tokenizer. Raises ModelError if a file is broken."""
        if TOKENIZER_FILE not in files:
            return None
        tokenizer = _tokenizer(files[TOKENIZER_FILE])
        config = _json_object(files.get(CONFIG_FILE, b"{}"), CONFIG_FILE)
        added = tokenizer.get_added_tokens_decoder()
        silent = frozenset(token for token, entry in added.items() if entry.special)
        special = {name: _token_text(config[name]) for name in config if name.endswith("_token") and config[name]}
        return cls(tokenizer, silent, _template(files, config), special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text, with the special tokens around it that the model expects."""
        if not text:
            raise InvalidRequest("the prompt is empty", code="prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not valid Unicode: {error.reason}", code="prompt") from error
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if not ids:
            raise InvalidRequest("the prompt has no tokens", code="prompt")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental one."""
        return Detokenizer(self.decode, self._is_silent)

    def _is_silent(self, token: int) -> bool:
        return token in self.silent or self.tokenizer.id_to_token(token) is None

    def render_chat(self, messages: Chat, **variables: object) -> str:
        """The prompt text for a conversation, ready for the assistant's answer. ``variables`` reach the template."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template: pass a prompt instead of messages", code="chat")
        if not messages:
            raise InvalidRequest("the conversation is empty", code="messages")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{number}] must be a mapping with a role and a content", code="messages")
        values = {**self.special, "add_generation_prompt": True, **variables, "messages": [dict(m) for m in messages]}
        try:
            return self.template.render(values)
        except (jinja2.TemplateError, *_TEMPLATE_TROUBLE) as error:
            raise InvalidRequest(f"the chat template refuses the conversation: {error}", code="messages") from error

    def encode_chat(self, messages: Chat, **variables: object) -> tuple[int, ...]:
        """The ids of a conversation. The template writes all special tokens itself, so none are added."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)


def _tokenizer(content: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ModelError(f"{TOKENIZER_FILE} can't be read: {error}") from error
    tokenizer.no_truncation()  # settings of the model's training; here they would cut prompts in silence
    tokenizer.no_padding()
    return tokenizer


def _json_object(content: bytes, name: str) -> dict[str, object]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ModelError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} must be a JSON object")
    return value


def _token_text(token: object) -> str:
    """A special token stands as a text or as an object with one."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _template(files: Mapping[str, bytes], config: Mapping[str, object]) -> jinja2.Template | None:
    source: object = config.get("chat_template")
    if TEMPLATE_FILE in files:
        source = files[TEMPLATE_FILE].decode("utf-8", errors="replace")
    if isinstance(source, list):  # several named templates: the one for plain conversations
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    try:
        return template_environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template can't be read: {error}") from error
