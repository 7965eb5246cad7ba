"""Messages between a trainer and a rollout server: JSON over HTTP, with token ids in both directions.

| call | |
|---|---|
| GET capabilities | what the server has loaded, and in which precision |
| PUT weights | a tar of a folder, with an adapter in peft's format or a whole model in Hugging Face's |
| POST draw | completions of prompts |
| POST score | log-probabilities of given tokens, also by the weights of the start |

The answer to weights is a receipt: random text, which requests to draw and score repeat. A server that has received
other weights since, or was restarted, refuses them with status 409. Random numbers come with the request: a completion
does not depend on the server that draws it, except for rounding.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

PATH = "/rollouts/v1"
"""Beginning of the calls' paths."""


def _decode_numbers(value: Any) -> Any:
    """Return float32 numbers that are written in base64, of any length."""
    if not isinstance(value, str):
        return value
    return np.frombuffer(base64.b64decode(value, validate=True), "<f4").copy()


def _encode_numbers(numbers: Any) -> str:
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


Numbers = Annotated[np.ndarray, BeforeValidator(_decode_numbers), PlainSerializer(_encode_numbers)]
"""Float32 numbers, in base64."""


class Message(BaseModel):
    """Base of what is sent: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class Capabilities(Message):
    """A server's model and its device.

    Attributes:
        start: digest of the weights that it was started with, and the receipt of these.
        vocabulary: number of logits.
        tokenizer: digest of the tokens and their numbers.
        max_length: maximum length of a row in tokens.
    """

    model: str
    start: str
    vocabulary: int
    tokenizer: str
    max_length: int
    accelerator: str
    precision: str


class Receipt(Message):
    """The answer to new weights: random text, which names them."""

    receipt: str


class DrawRequest(Message):
    """Prompts to complete.

    Attributes:
        receipt: that of the weights to draw from.
        prompts: token ids of each row, without padding.
        width: number of columns to which prompts are padded on the left, since padding changes rounding.
        uniform: `tokens` random numbers in [0, 1) of each row, one row after the other.
        tokens: maximum length of a completion.
        end_ids: tokens that end a completion.
    """

    receipt: str
    prompts: list[Annotated[list[int], Field(min_length=1)]] = Field(min_length=1)
    width: int = Field(ge=1)
    uniform: Numbers
    tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    end_ids: list[int]


class DrawnRow(Message):
    """A completion: its tokens, and the log-probability of each under the distribution that it was drawn from."""

    ids: list[int]
    log_probs: Numbers


class Drawn(Message):
    """The completions of a request, in its order."""

    receipt: str
    rows: list[DrawnRow]


class ScoreRequest(Message):
    """Rows whose tokens are scored, each given those before it, at temperature 1.

    Attributes:
        receipt: that of the weights, `Capabilities.start` for those that the server was started with.
    """

    receipt: str
    rows: list[Annotated[list[int], Field(min_length=2)]] = Field(min_length=1)


class Scored(Message):
    """The log-probabilities of all tokens of the rows but the first of each, one row after the other."""

    receipt: str
    log_probs: Numbers
