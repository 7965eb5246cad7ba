"""The rollout servers of one trainer: meet each, share rows out, and end the run if none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from torch import Tensor

from rlhf.errors import ConfigError, RunError
from rlhf.rollouts.client import RolloutServer, ServerError
from rlhf.rollouts.protocol import Capabilities

T = TypeVar("T")


def meet(server: RolloutServer, key: str, longest: int, remedy: str) -> Capabilities:
    """Return what a server has loaded.

    Args:
        server: the one to ask.
        key: of its address, for errors.
        longest: tokens of the longest row.
        remedy: what to do if it cannot be reached.

    Raises:
        ConfigError: it cannot be reached, or its context is too short.
    """
    try:
        has = server.capabilities()
    except ServerError as error:
        is_absent = isinstance(error.__cause__, OSError)
        raise ConfigError(f"{key}: {server.url}: {error}{f'; {remedy}' if is_absent else ''}") from error
    if has.max_length < longest:
        raise ConfigError(
            f"{key}: {server.url}: its context has {has.max_length} tokens, and rows have up to {longest}; lower "
            "data.max_prompt_length or data.max_completion_length"
        )
    return has


def share_rows(
    key: str,
    usable: list[RolloutServer],
    lost: list[str],
    count: int,
    ask: Callable[[RolloutServer, list[int]], Sequence[T]],
) -> tuple[list[T], list[str]]:
    """Have `count` rows answered, by all servers at the same time; if one fails, the others take its rows.

    Args:
        key: of the servers' addresses, for errors.
        usable: the servers to ask; those that fail are removed.
        lost: a line about each failed one is added.
        count: number of rows.
        ask: asks a server about rows, by their numbers, and raises `ServerError`; called in threads.

    Returns:
        The answers in the order of the rows, and the lines about the servers that have failed now.

    Raises:
        RunError: no server is left.
    """
    answers: dict[int, T] = {}
    failed: list[str] = []
    while missing := [row for row in range(count) if row not in answers]:
        if not usable:
            raise nobody_left(key, lost)
        asked = list(usable)[: len(missing)]
        shares = [share.tolist() for share in np.array_split(np.array(missing), len(asked))]
        with ThreadPoolExecutor(len(asked)) as threads:
            waiting = [threads.submit(ask, server, share) for server, share in zip(asked, shares)]
        for server, share, answer in zip(asked, shares, waiting):
            try:
                answers.update(zip(share, answer.result(), strict=True))
            except ServerError as error:
                usable.remove(server)
                failed.append(f"{server.url}: {error}")
                lost.append(failed[-1])
    return [answers[row] for row in range(count)], failed


def nobody_left(key: str, lost: Sequence[str]) -> RunError:
    """Return the error that ends the run; `lost` has a line about each server."""
    return RunError(
        f"{key}: no server is left ({'; '.join(lost)}); the run ends with its last good state: start them again, and "
        "continue with --resume"
    )


def real_tokens(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the tokens of each row, [B, T], where the mask is not 0."""
    return [[token for token, here in zip(*row) if here] for row in zip(ids.tolist(), mask.tolist())]
