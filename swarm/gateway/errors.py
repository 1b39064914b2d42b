"""Errors as HTTP clients get them: a status, and an error object in the format of their API. Pure."""

from __future__ import annotations

import math
import re
from typing import Any

from swarm.errors import InvalidRequest, Overloaded, SwarmError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response. ``param`` names the wrong field; ``code`` is a stable name for the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s
        self.is_counted = False  # counted as a failed answer, so not as a refusal

    def set_param(self, param: str) -> ApiError:
        """Set the field to the client's own name for it, and put the name into the message, the only place for it in
        Anthropic's format. Returns the same error."""
        self.param = param
        if param not in self.message:
            self.message = f"{param}: {self.message}"
        return self

    def drop_traceback(self) -> None:
        """Drop the traceback and its frames, which would keep whole bodies in memory until the next garbage
        collection."""
        self.__traceback__ = self.__context__ = self.__cause__ = None

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    def to_openai(self) -> dict[str, Any]:
        """Return the body that OpenAI's clients expect."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_anthropic(self) -> dict[str, Any]:
        """Return the body that Anthropic's clients expect."""
        kind = {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}.get(self.status, self.type)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def to_ollama(self) -> dict[str, Any]:
        """Return the body that Ollama's clients expect."""
        return {"error": self.message}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the format of the API of this path."""
        if path.startswith("/v1/messages"):
            return self.to_anthropic()
        return self.to_ollama() if path.startswith("/api/") else self.to_openai()


class ContextOverflow(ApiError):
    """The prompt leaves no room in the model's context. Routers and agents recognise the sentence of the API that they
    use, and then try another model or compact the conversation."""

    def __init__(self, num_tokens: int, context: int, *, is_least: bool = False) -> None:
        """Create the error. ``is_least``: ``num_tokens`` is a lower bound."""
        self._num_tokens, self._context, self._least = num_tokens, context, "at least " if is_least else ""
        super().__init__(400, self._sentence("prompt"), param="prompt", code="context_length_exceeded")

    def _sentence(self, param: str) -> str:
        return (
            f"This model's maximum context length is {self._context} tokens. However, you requested {self._least}"
            f"{self._num_tokens + 1} tokens ({self._num_tokens} in the {param}, 1 in the completion). Please reduce "
            f"the length of the {param}."
        )

    def set_param(self, param: str) -> ApiError:
        self.param, self.message = param, self._sentence(param)
        return self

    def to_anthropic(self) -> dict[str, Any]:
        text = f"prompt is too long: {self._num_tokens} tokens > {self._context - 1} maximum"
        return {"type": "error", "error": {"type": self.type, "message": text}}


class ThreadUnsupported(ApiError):
    """The body asks for a thread, a conversation that the server stores. The details let the tool runner of Anthropic's
    client continue without one."""

    def __init__(self) -> None:
        text = "thread is not supported here: send the whole conversation as messages"
        super().__init__(400, text, param="thread", code="unsupported_parameter")

    def to_anthropic(self) -> dict[str, Any]:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": {"type": self.type, "message": self.message, "details": details}}


def unsupported_field(field: str, why: str = "") -> ApiError:
    """Return the error for a field that would change the answer and that this server does not support."""
    reason = f"{field} is not supported here" + (f": {why}" if why else "; leave it out")
    return ApiError(400, reason, param=field, code="unsupported_parameter")


def invalid_field(field: str, why: str) -> ApiError:
    """Return the error for a field with an unusable value."""
    return ApiError(400, f"{field}: {why}", param=field, code="invalid_value")


def _field_of(code: str, text: str) -> str:
    """Return the field that an error of the client library is about. The broker's messages begin with the field's
    name."""
    if code == "invalid" and (named := re.match(r"(\w+)(?:: | is |\[)", text)) is not None:
        return named[1]
    return {"context": "prompt", "too_large": "max_tokens"}.get(code, code)


def to_api_error(error: SwarmError) -> ApiError:
    """Convert an error of the client library into an error response."""
    text = str(error)
    if isinstance(error, InvalidRequest):
        if error.code == "unknown":
            return ApiError(404, text, code="not_found")
        code = "context_length_exceeded" if error.code == "context" else error.code
        return ApiError(400, text, param=_field_of(error.code, text), code=code)
    if isinstance(error, Overloaded):
        code = "overloaded" if error.hint_status == 429 else "unavailable"
        return ApiError(error.hint_status, text, code=code, retry_after_s=error.retry_after_s)
    status = error.hint_status
    return ApiError(status, text, code=type(error).__name__, retry_after_s=2.0 if status == 503 else None)
