"""The requests of OpenAI's interface: which parameters are accepted, and what they mean here.

A parameter that OpenAI's interface has and this server does not is accepted with the value that changes nothing, and
refused with any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from rlhf.config.schema import SamplingConfig

_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
"""Parameters that are not implemented, with the values that ask for nothing."""

_ALTERNATIVE = re.compile(r"str|list\[.*\]")  # pydantic names the type that it has tried
_MESSAGES = {"extra_forbidden": "unknown parameter; remove it", "missing": "is missing"}


class RequestError(Exception):
    """A request that cannot be served as it is; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 400, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter = status, parameter


class Strict(BaseModel):
    """A JSON object without other keys than its fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """What a stream has besides the text."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class _Request(Strict):
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int = Field(1, ge=1)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_parameters_without_effect(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if value is not None}
        for name, neutral in _WITHOUT_EFFECT.items():
            if name not in cls.model_fields and name in values and values[name] not in neutral:
                raise ValueError(f"{name} is not supported; remove it")
        dropped = (_IGNORED | _WITHOUT_EFFECT.keys()) - cls.model_fields.keys()
        return {name: value for name, value in values.items() if name not in dropped}

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling of its completions; by default of the whole distribution, at temperature 1."""
        return SamplingConfig(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
        )

    @property
    def stops(self) -> list[str]:
        """The texts that end a completion, none of them empty."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]


class CompletionRequest(_Request):
    """A request to `/v1/completions`: prompts as texts or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0)

    @property
    def wants_log_probs(self) -> bool:
        """Return whether the response has the drawn tokens' log-probabilities."""
        return self.logprobs is not None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or several."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt

    @model_validator(mode="after")
    def _check_logprobs(self) -> CompletionRequest:
        if self.logprobs and self.logprobs > 1:
            raise ValueError("logprobs: only the drawn token's log-probability is returned; use 0 or 1")
        return self


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    annotations: list[Any] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(_Request):
    """A request to `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    @property
    def wants_log_probs(self) -> bool:
        """Return whether the response has the drawn tokens' log-probabilities."""
        return bool(self.logprobs)


async def read_json(request: Request, limit: int) -> bytes:
    """Return the body of a request of at most `limit` bytes.

    Raises:
        RequestError: it is no JSON, or too large.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("send JSON, with Content-Type: application/json", 415)
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            body += part
        elif size > 16 * limit:  # up to there it is read, since a client reads no answer while it sends
            break
    if size > limit:
        raise RequestError(f"the request is larger than {limit // 2**20} MiB", 413)
    return bytes(body)


def parse_request(model: type[Strict], body: bytes) -> Any:
    """Return the request in a JSON text.

    Raises:
        RequestError: the text is no such request; the message has the first problem.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"] if not _ALTERNATIVE.fullmatch(str(part)))
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        message = _MESSAGES.get(problem["type"], message)
        raise RequestError(f"{where}: {message}" if where else message, parameter=where or None) from None
