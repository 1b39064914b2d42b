"""Text model: converts text to token ids and back with the model's own tokenizer and chat template, without
transformers."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jinja2
from tokenizers import Tokenizer

from swarm.client.text.budget import TIME_S, TemplateBudget, TemplateTimeout, size_of, use_budget
from swarm.client.text.detokenize import Detokenizer
from swarm.client.text.spelling import RenderedChat, Spelling, is_control
from swarm.client.text.template import load_template
from swarm.client.text.vocabulary import Vocabulary, load_tokenizer
from swarm.errors import InvalidRequest, ModelError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"  # older multimodal checkpoints
ASSET_FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE, PROCESSOR_TEMPLATE_FILE)

_MANY_IDS = 1024  # from this many ids on, decoding releases the interpreter's lock
_READS_PARTS = re.compile(r"""['".]text\b""")  # in a template that can take the parts of a content
# Exceptions that Python raises when a template meets an unexpected value, such as a missing content.
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)

Chat = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """Options for rendering a conversation. ``time_s``: the template's limit of processor time. ``parse_special``:
    special tokens in messages become control tokens, as in most servers. ``continues``: the prompt ends inside the last
    message, which the answer continues."""

    time_s: float = TIME_S
    parse_special: bool = False
    continues: bool = False


DEFAULT_RENDERING = ChatRendering()
NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer and chat templates of a model. Built from the bytes of its files; safe to share between threads."""

    tokenizer: Tokenizer
    silent: frozenset[int]  # ids of special tokens, which have no text
    template: jinja2.Template | None
    special: Mapping[str, str]  # bos_token, eos_token, …: variables of chat templates
    # tokens outside the base vocabulary, special or not, by text
    added: Mapping[str, int] = field(default_factory=dict)
    tool_template: jinja2.Template | None = None  # separate template for conversations with tools, if the model has one
    template_source: str = ""  # original source; that of the template for tools, if there is one
    # secret words with which its templates are rewritten
    spelling: Spelling = field(default_factory=lambda: Spelling(()), repr=False)
    vocabulary: Vocabulary = field(init=False, repr=False)
    takes_parts: bool = field(init=False, default=False)  # the template shows a content only if it is a list of parts

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", Vocabulary(self.tokenizer, self.spelling))
        object.__setattr__(self, "takes_parts", self._needs_parts())

    @classmethod
    def load(cls, files: Mapping[str, bytes]) -> TextModel | None:
        """Load from the files by name; None if the model has no tokenizer. Raises ModelError if a file is broken."""
        if TOKENIZER_FILE not in files:
            return None
        tokenizer = load_tokenizer(files[TOKENIZER_FILE], TOKENIZER_FILE)
        config = _json_object(files.get(CONFIG_FILE, b"{}"), CONFIG_FILE)
        added = tokenizer.get_added_tokens_decoder()
        silent = frozenset(token for token, entry in added.items() if entry.special)
        by_text = {entry.content: token for token, entry in added.items()}
        spelling = Spelling(
            tuple(entry.content for entry in added.values() if is_control(entry.content, special=entry.special))
        )
        special = {name: _token_text(config[name]) for name in config if name.endswith("_token") and config[name]}
        sources = _template_sources(files, config)
        plain, tools = (_compile_template(sources.get(name), spelling) for name in ("default", "tool_use"))
        source = sources.get("tool_use") or sources.get("default") or ""
        return cls(tokenizer, silent, plain or tools, special, by_text, tools, source, spelling)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text, with the special tokens around it that the model expects. Special tokens in the
        text become control tokens. Raises InvalidRequest (code "context") if it certainly has more than ``most``
        tokens."""
        if not text:
            raise InvalidRequest("the prompt is empty", code="prompt")
        return _require_tokens(self.vocabulary.encode(text, add_special_tokens=add_special_tokens, most=most))

    def encode_input(self, text: str, second: str | None = None, *, most: int, cuts: bool = False) -> tuple[int, ...]:
        """Return the ids of a text to embed, or of a query and a document, with the special tokens that the model
        expects. ``cuts``: keep what fits of a text that has more than ``most`` tokens, instead of refusing it."""
        return _require_tokens(self.vocabulary.encode_input(text, second, most=most, cuts=cuts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""
        return self._decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of the ids including special tokens."""
        return self._decode(ids, skip_special_tokens=False)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if len(ids) < _MANY_IDS:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        [text] = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)  # decode_batch releases the interpreter's lock, and takes a little longer

    def detokenizer(self, visible: Sequence[int] = ()) -> Detokenizer:
        """Return a new incremental detokenizer whose text includes these special tokens."""
        if not visible:
            return Detokenizer(self.decode, self._is_silent)
        shown = frozenset(visible)
        return Detokenizer(self.decode_all, lambda token: token not in shown and self._is_silent(token))

    def _is_silent(self, token: int) -> bool:
        return token in self.silent or self.tokenizer.id_to_token(token) is None

    def _needs_parts(self) -> bool:
        """Whether the template drops a content that is a text, but shows it as a part, as those of some multimodal
        models do."""
        if self.template is None or not _READS_PARTS.search(self.template_source):
            return False
        probe = secrets.token_hex(8)
        return not self._shows(probe, probe) and self._shows(probe, _make_parts(probe))

    def _shows(self, text: str, content: object) -> bool:
        try:
            return text in self.render_chat([{"role": "user", "content": content}])
        except InvalidRequest:
            return False

    def render_chat(self, messages: Chat, **variables: object) -> str:
        """Return the prompt text for a conversation, ready for the assistant's answer. ``variables`` are passed to the
        template. If they include ``tools``, the model's template for tools is used, if it has one."""
        return self._render(messages, variables, DEFAULT_RENDERING).to_plain()

    def encode_chat(
        self,
        messages: Chat,
        variables: Mapping[str, object] = NO_VARIABLES,
        *,
        most: int | None = None,
        how: ChatRendering = DEFAULT_RENDERING,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation. The template writes all special tokens itself, so none are added. Special
        tokens in messages are plain text, unless ``how`` allows them."""
        rendered = self._render(messages, variables, how)
        if how.parse_special:
            return self.encode(rendered.to_plain(), add_special_tokens=False, most=most)
        if not (rendered.tokens or any(rendered.texts)):
            raise InvalidRequest("the prompt is empty", code="prompt")
        return _require_tokens(self.vocabulary.encode_rendered(rendered, most))

    def _render(self, messages: Chat, variables: Mapping[str, object], how: ChatRendering) -> RenderedChat:
        """Render the prompt, with the template's own control tokens separated from all other text."""
        template = self.tool_template if variables.get("tools") and self.tool_template else self.template
        if template is None:
            raise InvalidRequest("this model has no chat template: pass a prompt instead of messages", code="chat")
        if not messages:
            raise InvalidRequest("the conversation is empty", code="messages")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{number}] must be a mapping with a role and a content", code="messages")
        special = {name: self.spelling.spell(text) for name, text in self.special.items()}
        chat = [dict(message) for message in messages]
        values = {**special, "add_generation_prompt": True, **variables, "messages": chat}
        mark = secrets.token_hex(16)  # marks the place where the answer continues; no message can contain it
        if how.continues:
            chat[-1]["content"] = f"{chat[-1].get('content') or ''}{mark}"
            values["add_generation_prompt"] = False
        if self.takes_parts:
            for message in chat:
                if isinstance(message.get("content"), str):
                    message["content"] = _make_parts(message["content"])
        try:
            with use_budget(TemplateBudget(size_of(values), how.time_s)):
                text = template.render(values)
        except TemplateTimeout as error:
            raise TemplateTooSlow(f"the chat template refuses the conversation: {error}", code="messages") from error
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            why = _describe_error(self.spelling, error)
            raise InvalidRequest(f"the chat template refuses the conversation: {why}", code="messages") from error
        if how.continues:
            text, found, _ = text.rpartition(mark)
            if not found:
                raise InvalidRequest("the chat template does not show the last message", code="messages")
        return self.spelling.split_rendered(text)


def _make_parts(text: object) -> list[Mapping[str, object]]:
    return [{"type": "text", "text": text}]


def _describe_error(spelling: Spelling, error: Exception) -> str:
    """Describe a template's error without the secret words of control tokens, or parts of them."""
    try:
        return spelling.to_plain(str(error))
    except (LookupError, ValueError):
        return type(error).__name__


class TemplateTooSlow(InvalidRequest):
    """A template exceeded its time limit while it rendered a conversation."""


def _require_tokens(ids: tuple[int, ...]) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("the prompt has no tokens", code="prompt")
    return ids


def _json_object(content: bytes, name: str) -> dict[str, object]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ModelError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} must be a JSON object")
    return value


def _token_text(token: object) -> str:
    """Return the text of a special token, which is given as a string or as an object with one."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _template_sources(files: Mapping[str, bytes], config: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name: "default", and perhaps "tool_use"."""
    stored = _json_object(files.get(PROCESSOR_TEMPLATE_FILE, b"{}"), PROCESSOR_TEMPLATE_FILE)
    source = stored.get("chat_template") or config.get("chat_template")
    named = {"default": source}
    if isinstance(source, list):
        named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
    if TEMPLATE_FILE in files:
        named["default"] = files[TEMPLATE_FILE].decode("utf-8", errors="replace")
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _compile_template(source: str | None, spelling: Spelling) -> jinja2.Template | None:
    if source is None:
        return None
    try:
        return load_template(source, spelling.spell)
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template can't be read: {error}") from error
