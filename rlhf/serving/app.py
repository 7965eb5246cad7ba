"""The HTTP interface of a served model: who may ask, how much at a time, and the routes.

A request must come from no web page (`Origin`) but the server's own, and send JSON, which a page of another site cannot
do without asking first. On an address of this machine alone it must also name that in `Host` (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlhf.errors import USER_ERRORS, summarize_error
from rlhf.rollouts.protocol import PATH
from rlhf.serving.completions import Exchange
from rlhf.serving.engine import Engine
from rlhf.serving.judging import FILES, ChatPage
from rlhf.serving.requests import ChatRequest, CompletionRequest, RequestError, parse_request, read_json
from rlhf.serving.rollouts import RolloutService

logger = logging.getLogger(__name__)

MAX_BODY = 4 * 2**20  # bytes
_RETRY_AFTER = 1  # seconds
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


class ServedModel:
    """The routes of one model, and their counters.

    Attributes:
        closing: no new request is accepted.
    """

    def __init__(
        self,
        engine: Engine | None,
        name: str,
        *,
        token: str | None,
        hosts: tuple[str, ...] | None,
        rollouts: RolloutService | None = None,
        page: ChatPage | None = None,
    ) -> None:
        """Make the counters.

        Args:
            engine: draws the completions; None: only rollouts are served.
            name: the model's name in requests and responses.
            token: what requests must have in `Authorization: Bearer`; None: nothing.
            hosts: the names of the server that requests may use; None: any.
            rollouts: the calls of a trainer; None: there are none.
            page: the calls of the page; None: there is none.
        """
        self.engine, self.name = engine, name
        self.closing = False
        self._rollouts, self._page = rollouts, page
        self._token, self._hosts = token, hosts
        self._started = int(time.time())
        self._metrics = _Metrics(engine)

    def build(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/health", self._guard(self._health, needs_token=False)),
            Route("/metrics", self._guard(self._show_metrics)),
        ]
        if self.engine:
            routes += [
                Route("/v1/models", self._guard(self._list_models)),
                Route("/v1/models/{name:path}", self._guard(self._show_model)),
                Route("/v1/completions", self._guard(self._complete), methods=["POST"]),
                Route("/v1/chat/completions", self._guard(self._chat), methods=["POST"]),
            ]
        if rollouts := self._rollouts:
            routes += [
                Route(f"{PATH}/capabilities", self._guard(rollouts.show_capabilities)),
                Route(f"{PATH}/weights", self._guard(rollouts.take_weights), methods=["PUT"]),
                Route(f"{PATH}/draw", self._guard(rollouts.draw), methods=["POST"]),
                Route(f"{PATH}/score", self._guard(rollouts.score), methods=["POST"]),
            ]
        if page := self._page:
            routes += [
                *(Route(path, self._guard(page.show_page, needs_token=False)) for path in FILES),
                Route("/ui/state", self._guard(page.show_state)),
                Route("/ui/prompt", self._guard(page.show_prompt)),
                Route("/ui/question", self._guard(page.show_question)),
                Route("/ui/ask", self._guard(self._ask), methods=["POST"]),
                Route("/ui/judge", self._guard(page.judge), methods=["POST"]),
                Route("/ui/score", self._guard(page.score), methods=["POST"]),
            ]
        return Starlette(routes=routes, exception_handlers={404: _describe_status, 405: _describe_status})

    def _guard(
        self, handle: Callable[[Request], Awaitable[Response]], *, needs_token: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Check who asks, count the request, and turn errors into responses."""

        async def guarded(request: Request) -> Response:
            start = time.monotonic()
            try:
                self._check_caller(request, needs_token=needs_token)
                response = await handle(request)
            except RequestError as error:
                response = _error(str(error), error.status, error.parameter)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                response = _error(_report(error), 500)
            self._metrics.requests.labels(request.url.path, str(response.status_code)).inc()
            if not isinstance(response, StreamingResponse):
                self._metrics.seconds.labels(request.url.path).observe(time.monotonic() - start)
            return response

        return guarded

    def _check_caller(self, request: Request, *, needs_token: bool) -> None:
        if self._hosts is not None and request.url.hostname not in self._hosts:
            raise RequestError("unknown host; use the address that the server has printed", 403)
        origin = request.headers.get("origin")
        if origin is not None and not (self._page and origin == f"{request.url.scheme}://{request.url.netloc}"):
            raise RequestError("requests of web pages are refused", 403)
        if needs_token and self._token is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token.encode()):
                raise RequestError("the token is missing or wrong; send Authorization: Bearer TOKEN", 401)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ending" if self.closing else "ready"}, 503 if self.closing else 200)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _show_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise RequestError(f"{request.path_params['name']!r} is not served here, but {self.name!r}", 404)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self._started, "owned_by": "rlhf"}
        assert self.engine
        return {**card, "max_model_len": self.engine.model.max_length}

    async def _complete(self, request: Request) -> Response:
        return await self._draw(request, CompletionRequest)

    async def _chat(self, request: Request) -> Response:
        return await self._draw(request, ChatRequest)

    async def _ask(self, request: Request) -> Response:
        self._check_open()
        assert self._page
        asked = await self._page.ask(request)
        events = self._send(self._page.draw(asked), asked.exchanges, request.url.path)
        return StreamingResponse(events, media_type="text/event-stream")

    def _check_open(self) -> None:
        if self.closing:
            raise RequestError("the server is ending", 503)

    async def _draw(self, request: Request, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
        self._check_open()
        parsed = parse_request(kind, await read_json(request, MAX_BODY))
        assert self.engine
        exchange = Exchange(self.engine, self.name, parsed)
        exchange.submit()
        if parsed.stream:
            events = self._send(exchange.stream(), [exchange], request.url.path)
            return StreamingResponse(events, media_type="text/event-stream")
        waiting = asyncio.ensure_future(exchange.respond())
        leaving = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait([waiting, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientDisconnect
            return JSONResponse(waiting.result())
        finally:
            exchange.cancel()
            waiting.cancel()
            leaving.cancel()
            self._metrics.count(exchange)

    async def _send(self, events: AsyncIterator[str], exchanges: Sequence[Exchange], path: str) -> AsyncIterator[str]:
        start = time.monotonic()
        try:
            async for event in events:
                yield event
        except Exception as error:  # the status has been sent already
            yield f"data: {_error(_report(error), 500).body.decode()}\n\n"  # type: ignore[union-attr]
        finally:
            for exchange in exchanges:
                exchange.cancel()
                self._metrics.count(exchange)
            self._metrics.seconds.labels(path).observe(time.monotonic() - start)


class _Metrics:
    """Counters in the format of Prometheus."""

    def __init__(self, engine: Engine | None) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("rlhf_requests", "Requests by path and status", ["path", "status"], registry=registry)
        self.seconds = Histogram("rlhf_request_seconds", "Time to the last token", ["path"], registry=registry)
        self._prompt_tokens = Counter("rlhf_prompt_tokens", "Tokens of prompts", registry=registry)
        self._drawn_tokens = Counter("rlhf_drawn_tokens", "Tokens drawn", registry=registry)
        if engine is None:
            return
        waiting = Gauge("rlhf_waiting_completions", "Completions in the queue", registry=registry)
        waiting.set_function(lambda: engine.waiting)
        running = Gauge("rlhf_running_completions", "Completions that are being drawn", registry=registry)
        running.set_function(lambda: engine.rows)

    def count(self, exchange: Exchange) -> None:
        """Add the tokens of a request that has ended."""
        self._prompt_tokens.inc(exchange.prompt_tokens)
        self._drawn_tokens.inc(sum(choice.job.drawn for choice in exchange.choices))


def _report(error: Exception) -> str:
    """Log an error of the server, and return what the client may know of it."""
    logger.error("a request failed: %s", summarize_error(error), exc_info=logger.isEnabledFor(logging.DEBUG))
    return str(error) if isinstance(error, USER_ERRORS) else f"internal error: {type(error).__name__}"


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _describe_status(request: Request, error: Any) -> Response:
    reason = "method not allowed" if error.status_code == 405 else f"no such path: {request.url.path}"
    return _error(reason, error.status_code)


def _error(message: str, status: int, parameter: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's interface writes it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {"Retry-After": str(_RETRY_AFTER)} if status in (429, 503) else None
    content = {"error": {"message": message, "type": kind, "param": parameter, "code": None}}
    return JSONResponse(content, status, headers)
