"""The calls of the page to talk and to judge (`rlhf serve --ui`): questions, their replies, judgements and scores.

A question is a conversation that one model replies to, or two, whose sides are drawn by lot. The replies are those that
this process has drawn, never those that a page sends, and nothing that a page receives before the judgement says which
model is on which side.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlhf.data.formats import ColumnMapping
from rlhf.data.records import Message, RejectedRecordError, Row, parse_record
from rlhf.evaluation.labels import (
    FIRST,
    SECOND,
    LabelFile,
    Question,
    count_preferences,
    prompt_identity,
    write_prompt,
)
from rlhf.evaluation.models import RewardModel
from rlhf.serving.completions import Exchange, format_event
from rlhf.serving.engine import Engine
from rlhf.serving.requests import ChatMessage, ChatRequest, RequestError, Strict, parse_request, read_json

MAX_BODY = 2**20  # bytes
_OPEN = 100  # questions that are remembered
_SOURCE = "rlhf serve"
FILES = {"/": "page.html", "/ui/page.js": "page.js", "/ui/page.css": "page.css"}
"""The page's files: path of the request -> name in the folder `assets`."""
_ASSETS = Path(__file__).with_name("assets")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class AskRequest(Strict):
    """A conversation to reply to, typed or by its number among the prompts, and how replies are drawn."""

    messages: list[ChatMessage] = Field(default_factory=list)
    prompt: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None


class JudgeRequest(Strict):
    """A judgement of a question's replies."""

    question: str
    key: Literal["1", "2", "=", "s"]


class ScoreRequest(Strict):
    """A question whose replies are to be scored."""

    question: str


@dataclass
class Asked:
    """A question on a page.

    Attributes:
        sides: which model replies on each side.
        exchanges: the request of each side.
        key: the judgement; empty before that.
    """

    id: str
    row: Row
    sides: tuple[int, ...]
    exchanges: tuple[Exchange, ...]
    key: str = ""

    @property
    def texts(self) -> list[str]:
        """The replies, as far as they are drawn."""
        return [exchange.choices[0].text for exchange in self.exchanges]

    @property
    def finishes(self) -> list[str]:
        """The reason why each reply has ended; empty before that."""
        return [exchange.choices[0].finish for exchange in self.exchanges]


class ChatPage:
    """The models of a page, the prompts, and the file of judgements.

    Attributes:
        names: the models' names in the file.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        names: Sequence[str],
        *,
        prompts: Sequence[Row] = (),
        reward_model: RewardModel | None = None,
        file: LabelFile | None = None,
    ) -> None:
        """Serve one model, or two that are judged.

        Args:
            engines: of each model; twice the same for two samples of one model.
            names: of each model.
            prompts: what may be asked by number.
            reward_model: scores replies; None: nothing does.
            file: receives the judgements of two models.
        """
        self.names = tuple(names)
        self._engines, self._prompts, self._reward_model, self._file = tuple(engines), prompts, reward_model, file
        self._identities = [prompt_identity(write_prompt(row)) for row in prompts]
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._writing = asyncio.Lock()

    # --- the page's files

    async def show_page(self, request: Request) -> Response:
        """Answer with one of `FILES`, which are the same for all models."""
        name = FILES[request.url.path]
        content = (_ASSETS / name).read_bytes()
        return Response(content, headers=_HEADERS, media_type=_TYPES[name[name.index(".") :]])

    # --- what a page knows

    async def show_state(self, request: Request) -> Response:
        """Answer with the models, the settings and the judgements so far."""
        models = [engine.model for engine in self._engines]
        return _respond(
            {
                "models": self.names,
                "converses": all(model.converses for model in models),
                "max_tokens": min(engine.max_tokens for engine in self._engines),
                "reward_model": self._reward_model.name if self._reward_model else None,
                "prompts": len(self._prompts),
                **self._count(),
            }
        )

    async def show_prompt(self, request: Request) -> Response:
        """Answer with the conversation of a prompt."""
        number = request.query_params.get("number", "")
        return _respond({"messages": _list_messages(self._find_prompt(int(number) if number.isdecimal() else -1))})

    async def show_question(self, request: Request) -> Response:
        """Answer with a question as it is, for a page that was loaded again."""
        asked = self._find(request.query_params.get("id", ""))
        replies = [{"text": text, "finish": finish} for text, finish in zip(asked.texts, asked.finishes)]
        return _respond(
            {"messages": _list_messages(asked.row), "replies": replies, "key": asked.key, "models": self._reveal(asked)}
        )

    def _reveal(self, asked: Asked) -> list[str] | None:
        """Return the model of each side of a question that is judged, or has one side; else None."""
        return [self.names[side] for side in asked.sides] if asked.key or len(asked.sides) == 1 else None

    def _count(self) -> dict[str, Any]:
        """Return the judgements in the file, and the first prompt without one."""
        if self._file is None:
            return {"judgements": None, "next": 0 if self._prompts else None}
        labels, skips = self._file.labels, self._file.skips
        done = {prompt_identity(label["prompt"]) for label in (*labels, *skips)}
        first, second = self.names
        preference = count_preferences(labels, second, first) if first != second else None
        return {
            "judgements": {
                "file": str(self._file.path),
                "pairs": len(labels) - self._file.ties,
                "ties": self._file.ties,
                "skips": len(skips),
                "win_rate": preference and {**preference._asdict(), "interval": list(preference.interval)},
            },
            "next": next((number for number, identity in enumerate(self._identities) if identity not in done), None),
        }

    # --- questions

    async def ask(self, request: Request) -> Asked:
        """Return a new question, whose first reply waits to be drawn.

        Raises:
            RequestError: the conversation cannot be replied to.
        """
        parsed = parse_request(AskRequest, await read_json(request, MAX_BODY))
        if parsed.prompt is not None:
            row = self._find_prompt(parsed.prompt)
        else:
            row = _make_row([Message(message.role, message.text) for message in parsed.messages])
        settings = {"temperature": parsed.temperature, "top_p": parsed.top_p, "top_k": parsed.top_k}
        settings |= {"max_tokens": parsed.max_tokens, "messages": _list_messages(row), "stream": True}
        sides = tuple(range(len(self._engines)))
        if secrets.randbelow(2):
            sides = sides[::-1]
        # The seed belongs to the model, not to its side; two samples of one model need two.
        seeds = [parsed.seed if parsed.seed is None else parsed.seed + side for side in sides]
        exchanges = tuple(
            Exchange(self._engines[side], "", ChatRequest(**settings, seed=seed)) for side, seed in zip(sides, seeds)
        )
        exchanges[0].submit()
        asked = Asked(secrets.token_hex(8), row, sides, exchanges)
        self._asked[asked.id] = asked
        while len(self._asked) > _OPEN:
            self._asked.popitem(last=False)
        return asked

    async def draw(self, asked: Asked) -> AsyncIterator[str]:
        """Yield the replies as events, the left one first: the order of the models would give their sides away."""
        yield format_event({"question": asked.id, "messages": _list_messages(asked.row)})
        for side, exchange in enumerate(asked.exchanges):
            if side:
                exchange.submit()
            (choice,) = exchange.choices
            async for piece, _ in choice.pieces():
                yield format_event({"side": side, "text": piece, "finish": choice.finish})
        yield format_event({"models": self._reveal(asked)})

    async def judge(self, request: Request) -> Response:
        """Write a judgement to the file, then answer which model was on which side."""
        parsed = parse_request(JudgeRequest, await read_json(request, MAX_BODY))
        asked = self._find(parsed.question)
        if self._file is None:
            raise RequestError("one model alone is not judged; start the server with --against", 409)
        if not all(asked.finishes):
            raise RequestError("the replies are not complete; wait, or ask again", 409)
        if parsed.key in (FIRST, SECOND) and asked.texts[0] == asked.texts[1]:
            raise RequestError("both replies are equal; press = or s", 409)
        async with self._writing:
            if asked.key:
                raise RequestError("this question is judged already", 409)
            left, right = asked.texts
            model, other = (self.names[side] for side in asked.sides)
            line = Question(asked.row, (left, right), (model, other)).answer(parsed.key)
            await asyncio.to_thread(self._file.append, line)
            asked.key = parsed.key
        return _respond({"models": self._reveal(asked), **self._count()})

    async def score(self, request: Request) -> Response:
        """Answer with the reward model's scores of a question's replies."""
        asked = self._find(parse_request(ScoreRequest, await read_json(request, MAX_BODY)).question)
        judge = self._reward_model
        if judge is None:
            raise RequestError("there is no reward model; start the server with --reward-model", 409)
        if not all(asked.finishes):
            raise RequestError("the replies are not complete; wait, or ask again", 409)
        prompts, cut = [asked.row.prompt] * len(asked.texts), [finish == "length" for finish in asked.finishes]
        sequences = judge.encode_completions(prompts, asked.texts, cut)
        if max(map(len, sequences)) > judge.max_length:
            raise RequestError(f"the conversation is longer than the {judge.max_length} tokens that {judge.name} reads")
        scores = await asyncio.wrap_future(self._engines[0].call(lambda: judge.scores(sequences)))
        return _respond({"scores": scores})

    def _find(self, name: str) -> Asked:
        if name not in self._asked:
            raise RequestError("no such question here; ask again", 404)
        return self._asked[name]

    def _find_prompt(self, number: int) -> Row:
        if not 0 <= number < len(self._prompts):
            raise RequestError(f"prompt: there are {len(self._prompts)}, from 0 on", 404, "prompt")
        return self._prompts[number]


def _make_row(messages: Sequence[Message]) -> Row:
    """Return the row that a typed conversation is read back as from a source.

    Raises:
        RequestError: a source could not have it.
    """
    columns = ColumnMapping(prompt="prompt")
    try:
        row = parse_record({"prompt": [vars(message) for message in messages]}, columns, _SOURCE)
        if row.prompt[-1].role != "user":
            raise RequestError("messages: the last one must be the user's", parameter="messages")
        if len(row.prompt) == 1:
            plain = parse_record({"prompt": row.prompt[0].content}, columns, _SOURCE)
            row = plain if plain.prompt == row.prompt else row
    except RejectedRecordError as error:
        raise RequestError(f"messages: {error}", parameter="messages") from error
    return row


def _list_messages(row: Row) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in row.prompt]


def _respond(content: dict[str, Any]) -> Response:
    return JSONResponse(content, headers=_HEADERS)
