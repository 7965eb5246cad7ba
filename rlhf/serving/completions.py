"""From a request to its response: jobs for the engine, and their tokens as OpenAI's interface writes them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.records import Message
from rlhf.data.text_stream import TextStream
from rlhf.errors import RLHFError
from rlhf.generation.decoder import DrawnToken
from rlhf.serving.engine import CompletionJob, Engine, Event, QueueFull
from rlhf.serving.requests import ChatRequest, CompletionRequest, RequestError

_COMPLETION_TOKENS = 16  # of /v1/completions, if the request names no number: OpenAI's
_SEEDS = 2**63


@dataclass
class Choice:
    """One completion of a request, as far as it is drawn.

    Attributes:
        finish: why it ended, `stop` or `length`; empty before that.
        count: tokens drawn, the end token included.
    """

    index: int
    job: CompletionJob
    tokens: asyncio.Queue[Event]
    stream: TextStream
    stops: Sequence[str]
    strips: bool
    finish: str = ""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    _held: str = ""  # certain text that may be the beginning of a stop
    _ended: bool = False  # by an end token

    @property
    def count(self) -> int:
        """The number of tokens drawn, the end token included."""
        return len(self.ids)

    async def pieces(self) -> AsyncIterator[tuple[str, list[DrawnToken]]]:
        """Yield the text and the tokens since the piece before, until the completion ends.

        Raises:
            Exception: the engine's, if it could not draw the completion.
        """
        new: list[DrawnToken] = []
        while not self.finish:
            token = await self.tokens.get()
            if isinstance(token, Exception):
                raise token
            if token is None:
                piece = self._release(self.stream.end(), last=True)
                self.finish = self.finish or ("stop" if self._ended else "length")
            else:
                new.append(token)
                self.ids.append(token.id)
                self.log_probs.append(token.log_prob)
                self._ended = token.ended
                piece = self._release("" if token.ended else self.stream.add(token.id))
            if piece or self.finish:
                yield piece, new
                new = []

    def _release(self, text: str, *, last: bool = False) -> str:
        """Return the part of the text so far that cannot be in a stop; end at the first stop."""
        held = self._held + text
        if self.strips and not self.text:
            held = held.lstrip()
        found = [position for stop in self.stops if (position := held.find(stop)) >= 0]
        if found:
            self.finish, self.job.cancelled = "stop", True
            held, keep = held[: min(found)], 0
        else:
            keep = 0 if last else max((_overlap(held, stop) for stop in self.stops), default=0)
        self._held = held[len(held) - keep :]
        released = held[: len(held) - keep]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Exchange:
    """One request and its choices.

    Attributes:
        id: the response's.
    """

    def __init__(self, engine: Engine, name: str, request: CompletionRequest | ChatRequest) -> None:
        """Encode the prompts, without drawing anything.

        Raises:
            RequestError: the request is not for this model, or a prompt is too long.
        """
        self.engine, self.name, self.request = engine, name, request
        self.is_chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        if request.model not in (None, name):
            raise RequestError(f"model: {request.model!r} is not served here, but {name!r}", 404, "model")
        prompts = [self._encode_chat(request)] if isinstance(request, ChatRequest) else self._encode_prompts(request)
        if len(prompts) * request.n > engine.max_waiting:
            raise RequestError(
                f"{len(prompts)} x {request.n} completions are more than this server's queue of {engine.max_waiting}; "
                "send fewer at a time"
            )
        self.prompt_tokens = sum(map(len, prompts))
        lengths = [self._check_length(prompt) for prompt in prompts]
        seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
        loop = asyncio.get_running_loop()
        self.choices: list[Choice] = []
        for prompt, length in zip(prompts, lengths):
            for _ in range(request.n):
                queue: asyncio.Queue[Event] = asyncio.Queue()
                index = len(self.choices)
                job = CompletionJob(prompt, length, request.sampling, (seed + index) % _SEEDS, _sender(loop, queue))
                stream = TextStream(engine.model.tokenizer, prompt)
                self.choices.append(Choice(index, job, queue, stream, request.stops, strips=self.is_chat))

    def submit(self) -> None:
        """Give the jobs to the engine.

        Raises:
            RequestError: too many wait.
        """
        try:
            self.engine.submit([choice.job for choice in self.choices])
        except QueueFull as error:
            raise RequestError(str(error), 429) from error

    def cancel(self) -> None:
        """Draw no more tokens."""
        for choice in self.choices:
            choice.job.cancelled = True

    def _encode_chat(self, request: ChatRequest) -> list[int]:
        roles = {"developer": "system"}
        messages = [Message(roles.get(message.role, message.role), message.text) for message in request.messages]
        model = self.engine.model
        try:
            return encode_conversation(model.tokenizer, messages, model.prompt_format)
        except RLHFError as error:
            raise RequestError(f"messages: {error}", parameter="messages") from error

    def _encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        tokenizer = self.engine.model.tokenizer
        prompts: list[list[int]] = []
        size = len(tokenizer)
        for prompt in request.prompts:
            if not isinstance(prompt, str) and any(not 0 <= token < size for token in prompt):
                raise RequestError(f"prompt: a token id is not from 0 to {size - 1}", parameter="prompt")
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            if not ids:
                raise RequestError("prompt: is empty; send at least one token", parameter="prompt")
            prompts.append(ids)
        if not prompts:
            raise RequestError("prompt: is empty; send at least one prompt", parameter="prompt")
        return prompts

    def _check_length(self, prompt: Sequence[int]) -> int:
        """Return the maximum number of tokens of the completion.

        Raises:
            RequestError: the model's context, or this server's limit, is too short for it.
        """
        context, limit, request = self.engine.model.max_length, self.engine.max_tokens, self.request
        asked = request.max_tokens
        if isinstance(request, ChatRequest):
            asked = request.max_completion_tokens or asked
        elif asked is None:
            asked = min(_COMPLETION_TOKENS, limit)
        room = context - len(prompt)
        if asked and asked > limit:
            raise RequestError(f"max_tokens: {asked} is more than this server's {limit}", parameter="max_tokens")
        if room < (asked or 1):
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {asked or 1} more do not fit into the model's context of "
                f"{context}; shorten the prompt, or lower max_tokens"
            )
        return asked or min(limit, room)

    # --- responses

    async def respond(self) -> dict[str, Any]:
        """Return the whole response, when all choices have ended."""
        await asyncio.gather(*map(_drain, self.choices))
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": [self._whole(choice) for choice in self.choices],
            "usage": self._usage(),
        }

    async def stream(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events, a chunk for each piece of a choice."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        wants_usage = bool(self.request.stream_options and self.request.stream_options.include_usage)
        chunks: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        async def follow(choice: Choice) -> None:
            try:
                if self.is_chat:
                    opening = {"role": "assistant", "content": ""}
                    chunks.put_nowait({"index": choice.index, "delta": opening, "finish_reason": None})
                async for piece, tokens in choice.pieces():
                    chunks.put_nowait(self._chunk(choice, piece, tokens))
                chunks.put_nowait(None)
            except Exception as error:
                chunks.put_nowait(error)

        tasks = [asyncio.create_task(follow(choice)) for choice in self.choices]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await chunks.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    unfinished -= 1
                    continue
                yield format_event({**self._head(kind), "choices": [item], **({"usage": None} if wants_usage else {})})
            if wants_usage:
                yield format_event({**self._head(kind), "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.name}

    def _usage(self) -> dict[str, int]:
        drawn = sum(choice.count for choice in self.choices)
        used = self.prompt_tokens
        return {"prompt_tokens": used, "completion_tokens": drawn, "total_tokens": used + drawn}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": choice.text}} if self.is_chat else {"text": choice.text}
        return self._choice(choice, content, choice.ids, choice.log_probs)

    def _chunk(self, choice: Choice, piece: str, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        content = {"delta": {"content": piece}} if self.is_chat else {"text": piece}
        return self._choice(choice, content, [token.id for token in tokens], [token.log_prob for token in tokens])

    def _choice(
        self, choice: Choice, content: dict[str, Any], ids: Sequence[int], log_probs: Sequence[float]
    ) -> dict[str, Any]:
        written = {"index": choice.index, **content, "finish_reason": choice.finish or None, "logprobs": None}
        if self.request.wants_log_probs:
            written["logprobs"] = self._log_probs(ids, log_probs)
        if self.request.return_token_ids:
            written["token_ids"] = list(ids)
        return written

    def _log_probs(self, ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        texts = [self.engine.model.tokenizer.decode([token]) for token in ids]
        if not self.is_chat:
            return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": None}
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
                for text, value in zip(texts, log_probs)
            ]
        }


def _bytes(text: str) -> list[int] | None:
    """Return the bytes of a token; None if it is a part of a character, whose bytes a tokenizer does not tell."""
    return None if "\ufffd" in text else list(text.encode())


def _sender(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Event]) -> Callable[[Event], None]:
    def send(item: Event) -> None:
        with suppress(RuntimeError):  # the server has ended, and its loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, item)

    return send


async def _drain(choice: Choice) -> None:
    async for _ in choice.pieces():
        pass


def format_event(data: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
