"""The section about rollouts that other processes draw, `ppo.rollout`."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from rlhf.config.types import ConfigModel, short_repr
from rlhf.errors import ConfigError

PROBE_ROWS, PROBE_TOKENS = 32, 64
"""The most rows, and tokens of each, that trainer and servers score after each hand-over."""

SERVE_TOKEN = "RLHF_SERVE_TOKEN"
"""The environment variable with the token that a server demands and its clients send."""


def read_token() -> str | None:
    """Return the token in the environment; None if there is none.

    Raises:
        ConfigError: it is empty, or has characters that a request cannot send; the message does not contain it.
    """
    token = os.environ.get(SERVE_TOKEN)
    if token is None:
        return None
    if not token.strip():
        raise ConfigError(f"{SERVE_TOKEN}: is empty; set a token, or unset it")
    if not all(" " <= character <= "~" for character in token.strip()):
        raise ConfigError(f"{SERVE_TOKEN}: has characters other than printable ASCII; set another token")
    return token.strip()


def _parse_urls(value: Any) -> Any:
    """Return the addresses of servers, one or a list of them, without a slash at their ends.

    Raises:
        ValueError: one is no address.
    """
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, list | tuple):
        return value
    for url in urls:
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
            usable = bool(parts and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        except ValueError:  # a port that is no number
            usable = False
        if not usable or parts.query or parts.fragment or "@" in parts.netloc:  # type: ignore[union-attr]
            raise ValueError(f"expected addresses such as http://node07:8653, got {short_repr(url)}")
    urls = [url.rstrip("/").removesuffix("/v1") for url in urls]  # as the server prints it
    if repeated := {url for url in urls if urls.count(url) > 1}:
        raise ValueError(f"{min(repeated)} is named twice; name each server once")
    return tuple(urls)


ServerUrls = Annotated[tuple[str, ...], BeforeValidator(_parse_urls)]
Correction = Literal["none", "tis", "mis"]


class RolloutConfig(ConfigModel):
    """Rollouts by servers (`rlhf serve MODEL --rollouts`), which may be on other machines and devices."""

    where: ServerUrls = Field(
        (), description="addresses of rollout servers, such as http://node07:8653; empty: rollouts are drawn here"
    )
    weights: Literal["adapter", "files"] | None = Field(
        None,
        description="what servers receive after each step: the LoRA adapter, which they add to the model that they "
        "were started with, or the files of the whole model; empty: adapter with LoRA, else files",
    )
    staleness: Literal[0, 1] = Field(
        0,
        description="1: servers draw the next rollout while this one trains, so by weights that are one step older "
        "than those that it trains; needs a correction",
    )
    correction: Correction = Field(
        "none",
        description="weights of tokens in the policy's loss, for servers that draw from other probabilities (another "
        "precision, older weights): the ratio of trained and drawn probability, truncated at the limit (tis), or 0 "
        "beyond the limit (mis); none: all are 1",
    )
    correction_limit: float = Field(
        2.0, gt=1, description="largest weight, and of mis 1 / the smallest one that is not 0"
    )
    timeout: float = Field(600.0, gt=0, description="seconds that a server may take for a call, such as a rollout")
