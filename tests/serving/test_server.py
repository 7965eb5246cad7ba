"""`rlhf serve` in a process: OpenAI's client gets the completions of transformers, and strangers get nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.records import Message
from rlhf.launchers.coordinator import find_free_port
from tests.forks import Forks
from tests.helpers import user_environment
from tests.serving.processes import NAME, Server

QUESTION = [{"role": "user", "content": "the cat and the dog"}]


@pytest.fixture(scope="module")
def server(forks: Forks, folder: Path) -> Iterator[Server]:
    server = Server(forks, folder, "--max-tokens", "64", "--queue", "8")
    yield server
    assert server.end() == (0, "")


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


class Truth:
    """The greedy completions of transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, prompt: list[int], length: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    def text(self, prompt: list[int], length: int) -> str:
        before, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + self.ids(prompt, length))
        )
        return whole[len(before) :]

    def chat_prompt(self) -> list[int]:
        messages = [Message(message["role"], message["content"]) for message in QUESTION]
        return encode_conversation(self.tokenizer, messages, "template" if self.tokenizer.chat_template else "plain")


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth(folder)


def test_completions_are_those_of_transformers(client: openai.OpenAI, truth: Truth) -> None:
    prompts = ["the cat", "a dog and"]
    ids = [truth.tokenizer(prompt)["input_ids"] for prompt in prompts]
    response = client.completions.create(
        model=NAME, prompt=prompts, temperature=0, max_tokens=20, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in response.choices] == [0, 1]
    assert [choice.text for choice in response.choices] == [truth.text(prompt, 20) for prompt in ids]
    assert [choice.model_extra["token_ids"] for choice in response.choices] == [truth.ids(prompt, 20) for prompt in ids]
    assert response.usage and response.usage.prompt_tokens == sum(map(len, ids))
    assert response.usage.completion_tokens == sum(len(truth.ids(prompt, 20)) for prompt in ids)
    by_ids = client.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=20)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in response.choices]


def test_chat_is_that_of_transformers_whole_and_streamed(client: openai.OpenAI, truth: Truth) -> None:
    prompt = truth.chat_prompt()
    expected = truth.text(prompt, 30).lstrip()
    request: Any = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 30}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == expected
    reason = "stop" if truth.ids(prompt, 30)[-1] == truth.tokenizer.eos_token_id else "length"
    assert whole.choices[0].finish_reason == reason
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert len(chunks) > 10 and chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, reason]
    assert chunks[-1].usage == whole.usage


def test_log_probs_are_those_of_transformers(client: openai.OpenAI, truth: Truth) -> None:
    prompt = truth.tokenizer("the cat")["input_ids"]
    response = client.completions.create(
        model=NAME, prompt=prompt, temperature=0.8, max_tokens=20, logprobs=0, seed=4, n=2,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert response.choices[0].text != response.choices[1].text
    for choice in response.choices:
        ids = choice.model_extra["token_ids"]
        with torch.no_grad():
            logits = truth.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.8).log_softmax(-1)[range(len(ids)), ids]
        assert choice.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=2e-5)


def test_seed_repeats_a_completion(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=NAME, prompt="the cat", max_tokens=30, seed=seed).choices[0].text
        for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_stop_ends_a_completion_and_is_not_shown(client: openai.OpenAI, truth: Truth) -> None:
    prompt = truth.tokenizer("the cat")["input_ids"]
    whole = truth.text(prompt, 40)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]  # of several tokens
    expected = whole[: whole.index(stop)]
    request: Any = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 40, "stop": ["never ever", stop]}
    response = client.completions.create(**request)
    assert (response.choices[0].text, response.choices[0].finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    unused = client.completions.create(**request | {"stop": [whole[-3:] + "~"]})
    assert unused.choices[0].text == whole, "text that could have been the beginning of a stop is shown in the end"


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "other"}, 404, "model: 'other' is not served here, but 'tiny'"),
        ({"max_tokens": 65}, 400, "max_tokens: 65 is more than this server's 64"),
        ({"max_tokens": 0}, 400, "max_tokens: must be greater than or equal to 1"),
        ({"prompt": "a " * 200}, 400, "shorten the prompt, or lower max_tokens"),
        ({"prompt": ""}, 400, "prompt: is empty"),
        ({"prompt": []}, 400, "prompt: is empty"),
        ({"prompt": [100_000]}, 400, "prompt: a token id is not from 0 to "),
        ({"prompt": [-1]}, 400, "prompt: a token id is not from 0 to "),
        ({"prompt": None}, 400, "prompt: is missing"),
        ({"temperature": -1}, 400, "temperature: must be greater than or equal to 0"),
        ({"temperature": "hot"}, 400, "temperature: must be a valid number"),
        ({"top_p": 0}, 400, "top_p: must be greater than 0"),
        ({"n": 9}, 400, "1 x 9 completions are more than this server's queue of 8; send fewer at a time"),
        ({"logprobs": 5}, 400, "only the drawn token's log-probability is returned; use 0 or 1"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported; remove it"),
        ({"echo": True}, 400, "echo is not supported; remove it"),
        ({"temprature": 0.5}, 400, "temprature: unknown parameter; remove it"),
        ({"stop": ["a"] * 5}, 400, "stop: "),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_request_is_refused_in_one_line(
    server: Server, changes: dict[str, Any], status: int, message: str
) -> None:
    given, response = server.post("/v1/completions", {"model": NAME, "prompt": "the cat", "max_tokens": 2} | changes)
    assert given == status and message in response["error"]["message"] and "\n" not in response["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"a" * 2**23 + b'"}', 413),
    ],
    ids=["half", "list", "no text", "deep", "large"],
)
def test_body_that_is_no_request_is_refused(server: Server, body: bytes, status: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        given, response = server.post(path, body)
        assert given == status and response["error"]["message"]


def test_parameters_that_ask_for_nothing_are_accepted(server: Server) -> None:
    neutral = {"presence_penalty": 0, "echo": False, "best_of": 1, "logit_bias": {}, "user": "me", "suffix": None}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | neutral)[0] == 200
    chat = {"tools": [], "response_format": {"type": "text"}, "top_logprobs": 0, "n": 1, "metadata": {"a": "b"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": " cat"}]}]
    assert server.post("/v1/chat/completions", {"messages": parts, "max_tokens": 1} | chat)[0] == 200
    nulls = dict.fromkeys(("n", "stream", "stop", "seed", "stream_options", "return_token_ids", "functions"))
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | nulls)[0] == 200
    turns = [{"role": "assistant", "content": None, "refusal": None}, {"role": "user", "content": "the cat"}]
    assert server.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1})[0] == 200
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stop": "Observation:"})[0] == 200
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert server.post("/v1/chat/completions", {"messages": image})[0] == 400


def test_web_pages_and_other_names_of_the_server_are_refused(server: Server) -> None:
    request = {"prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", request, Origin="http://evil.example")[0] == 403
    assert server.post("/v1/completions", request, Host="evil.example")[0] == 403
    assert server.post("/v1/completions", request, Content_Type="text/plain")[0] == 415
    assert server.get("/v1/other")[0] == 404 and server.get("/v1/completions")[0] == 405
    assert server.get("/v1/models", Host="localhost")[0] == 200


def test_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'other' is not served here, but 'tiny'"):
        client.models.retrieve("other")


def test_metrics_count_requests_and_tokens(server: Server, client: openai.OpenAI) -> None:
    def read(name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", server.get("/metrics")[1], re.MULTILINE) or ["0"]
        return float(value)

    names = ("rlhf_prompt_tokens_total", "rlhf_drawn_tokens_total",
             'rlhf_requests_total{path="/v1/completions",status="200"}')  # fmt: skip
    before = [read(name) for name in names]
    usage: Any = client.completions.create(model=NAME, prompt=["the", "a cat"], n=2, max_tokens=7).usage
    after = [read(name) for name in names]
    assert [now - then for now, then in zip(after, before)] == [usage.prompt_tokens, usage.completion_tokens, 1]
    assert read("rlhf_waiting_completions") == read("rlhf_running_completions") == 0


def test_client_that_leaves_stops_its_completion(server: Server, client: openai.OpenAI) -> None:
    for stream in (True, False):
        with contextlib.suppress(openai.APITimeoutError):
            response: Any = client.with_options(timeout=0.05 if not stream else 60).completions.create(
                model=NAME, prompt="the cat", n=8, max_tokens=64, stream=stream
            )
            if stream:
                next(iter(response))
                response.close()
    deadline = time.monotonic() + 30
    while "rlhf_running_completions 0.0" not in server.get("/metrics")[1]:
        assert time.monotonic() < deadline
    assert client.completions.create(model=NAME, prompt="the cat", max_tokens=1).choices


def test_requests_beyond_the_queue_are_refused(server: Server, client: openai.OpenAI) -> None:
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(client.completions.create(model=NAME, prompt="the cat", n=6, max_tokens=64))
        except openai.RateLimitError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(answers) == 8 and 0 < len(refused) < 8
    assert all("completions wait already; try again later" in str(answer) for answer in refused)
    assert {answer.response.headers["retry-after"] for answer in refused} == {"1"}


def test_token_is_needed_if_one_is_set(forks: Forks, folder: Path) -> None:
    server = Server(forks, folder, "--host", "0.0.0.0", RLHF_SERVE_TOKEN="open sesame")
    for token, status in ((None, 401), ("open", 401), ("open sesame", 200)):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for path in ("/v1/models", "/metrics"):
            assert server.get(path, **headers)[0] == status
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers)[0] == status
    assert server.client("open sesame").models.list().data[0].id == NAME
    assert server.end() == (0, "")


def test_signal_finishes_running_requests_and_refuses_new_ones(forks: Forks, folder: Path, truth: Truth) -> None:
    server = Server(forks, folder)
    prompt = truth.tokenizer("the cat")["input_ids"]
    chunks = iter(
        server.client().completions.create(model=NAME, prompt=[prompt] * 30, temperature=0, max_tokens=100, stream=True)
    )
    first = next(chunks)
    os.kill(server.process.pid, signal.SIGTERM)
    rest = list(chunks)
    texts = dict.fromkeys(range(30), "")
    for chunk in [first, *rest]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {truth.text(prompt, 100)}, "none is cut"
    assert server.get("/health")[0] in (0, 503)
    _, errors = server.process.communicate(timeout=60)
    assert (server.process.returncode, errors) == (0, "")


def test_second_signal_ends_at_once(forks: Forks, folder: Path) -> None:
    server = Server(forks, folder, "--batch-size", "1", "--queue", "1000")
    request = {"model": NAME, "prompt": ["the cat"] * 900, "max_tokens": 100}

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):  # the server ends before it answers
            server.post("/v1/completions", request)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 30
    while "rlhf_running_completions 1.0" not in server.get("/metrics")[1]:
        assert time.monotonic() < deadline
    os.kill(server.process.pid, signal.SIGINT)
    while server.process.poll() is None:
        os.kill(server.process.pid, signal.SIGINT)
        time.sleep(0.2)
    thread.join()
    assert (server.process.returncode, server.process.communicate()[1]) == (0, "")


@pytest.mark.parametrize(
    ("options", "environment", "line"),
    [
        (["--host", "0.0.0.0"], {}, "--host 0.0.0.0: other machines could ask, so set RLHF_SERVE_TOKEN to a token"),
        (["--host", "192.0.2.1"], {"RLHF_SERVE_TOKEN": "x"}, "--host 192.0.2.1, --port 8653: cannot be opened"),
        ([], {"RLHF_SERVE_TOKEN": " "}, "RLHF_SERVE_TOKEN: is empty; set a token, or unset it"),
        ([], {"RLHF_SERVE_TOKEN": "a\x07b"}, "RLHF_SERVE_TOKEN: has characters other than printable ASCII"),
        (["--stage", "sft"], {}, "--stage selects a model of a run"),
    ],
)
def test_server_that_cannot_start_says_why(
    forks: Forks, folder: Path, options: list[str], environment: dict[str, str], line: str
) -> None:
    process = forks.start("-m", "rlhf", "serve", str(folder), *options, environment=environment)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and line in errors and errors.count("\n") == 1


def test_port_in_use_is_refused_before_the_model_is_loaded(forks: Forks, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = forks.start("-m", "rlhf", "serve", str(folder), "--port", port)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and f"--port {port}: is in use; choose another" in errors


def test_backend_is_selected_before_torch_is_imported(folder: Path) -> None:
    """Some vendors' software must be imported first, or set variables before that."""
    code = (
        "import os, sys\n"
        "from rlhf.engine import select\n"
        "select.select_accelerator = lambda *_: os._exit(77 if 'torch' not in sys.modules else 1)\n"
        f"sys.argv = ['rlhf', 'serve', {str(folder)!r}, '--rollouts', '--port', '{find_free_port()}']\n"
        "from rlhf.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=user_environment())
    assert done.returncode == 77, done.stderr
