"""The page's calls in a process: sides are hidden until the judgement, which becomes a pair of the reward stage."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.schema import build_config
from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.records import Message
from rlhf.data.stage_dataset import load_stage
from rlhf.evaluation.labels import LabelFile, prompt_identity
from tests.evaluation.conftest import reward_model
from tests.forks import Forks
from tests.helpers import llama
from tests.serving.processes import Server
from tests.serving.test_server import Truth

PROMPTS = ["the cat and the dog", "where is the cow", "say moo please", "the owl", "no dog", "go away"]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A second model, with other greedy completions."""
    folder = tmp_path_factory.mktemp("other")
    llama(len(tokenizer), seed=1, initializer_range=0.5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("judge")
    return folder, reward_model(folder, tokenizer)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "questions.txt"
    file.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    return file


class Page:
    """What a page does, on a server that judges two models, and all that it has received."""

    def __init__(self, server: Server) -> None:
        self.server, self.received = server, ""

    @property
    def state(self) -> Any:
        return json.loads(self.server.get("/ui/state")[1])

    def ask(self, prompt: int | str | Sequence[dict[str, str]], **settings: Any) -> tuple[str, list[str]]:
        """Return a new question and its replies."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        key = "prompt" if isinstance(prompt, int) else "messages"
        status, text = self.post("ask", {key: prompt, **GREEDY, **settings})
        assert status == 200, text
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        sides = {event["side"] for event in events[1:-1]}
        return events[0]["question"], [
            "".join(event["text"] for event in events[1:-1] if event["side"] == side) for side in sorted(sides)
        ]

    def judge(self, question: str, key: str) -> Any:
        status, text = self.post("judge", {"question": question, "key": key})
        return json.loads(text) if status == 200 else (status, json.loads(text)["error"]["message"])

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", **headers}
        address = f"{self.server.address}/ui/{path}"
        status, text = self.server.send(urllib.request.Request(address, json.dumps(body).encode(), headers))
        self.received += text
        return status, text


def start(forks: Forks, folder: Path, *options: object, **environment: str) -> Page:
    return Page(Server(forks, folder, "--ui", *map(str, options), **environment))


@pytest.fixture(scope="module")
def models(folder: Path, other: Path) -> tuple[str, str]:
    return str(folder), str(other)


@pytest.fixture(scope="module")
def page(
    forks: Forks, folder: Path, other: Path, judge: Any, questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    file = tmp_path_factory.mktemp("judged") / "labels.jsonl"
    page = start(forks, folder, "--against", other, "--prompts", questions, "--pairs", file, "-R", judge[0])
    yield page
    assert page.server.end() == (0, "")


@pytest.fixture(scope="module")
def greedy(models: tuple[str, str]) -> Any:
    """(model, prompt) -> its greedy reply by transformers."""
    truths = {model: Truth(Path(model)) for model in models}

    def reply(model: str, prompt: str) -> str:
        truth = truths[model]
        ids = encode_conversation(
            truth.tokenizer, [Message("user", prompt)], "template" if truth.tokenizer.chat_template else "plain"
        )
        return truth.text(ids, GREEDY["max_tokens"]).lstrip()

    return reply


def read_pairs(path: str | Path, tokenizer: Any) -> list[tuple[str, str, str]]:
    """Return the (prompt, chosen, rejected) that the reward stage trains on, if the file is its only source."""
    settings = build_config({"data": {"datasets": [str(path)], "stage_split": "0:1:0"}}).data
    data = load_stage(settings, "reward", tokenizer, seed=0, end_ids=[tokenizer.eos_token_id])
    rows = [example.row for example in (*data.train, *data.heldout)]
    return [(row.text, row.chosen or "", row.rejected or "") for row in rows]


def test_sides_are_drawn_by_lot_and_hidden_until_the_judgement(
    page: Page, models: tuple[str, str], greedy: Any, tokenizer: Any, tmp_path: Path
) -> None:
    page.received = ""
    asked = [page.ask(number % len(PROMPTS)) for number in range(16)]
    for question, _ in asked:
        page.received += page.server.get(f"/ui/question?id={question}")[1]
        assert page.post("score", {"question": question})[0] == 200
    assert not any(Path(model).name in page.received for model in models), "a name tells which side is whose"
    before = page.state["judgements"]
    expected, lines = [], []
    for number, ((question, replies), key) in enumerate(zip(asked, itertools.cycle("1=2s"))):
        prompt = PROMPTS[number % len(PROMPTS)]
        sides = page.judge(question, key)["models"]
        assert replies == [greedy(side, prompt) for side in sides], "the names are those of the replies"
        lines.append((prompt, sides))
        if key in "12":
            better = int(key) - 1
            expected.append((prompt, greedy(sides[better], prompt), greedy(sides[1 - better], prompt)))
    assert len(Counter(tuple(sides) for _, sides in lines)) == 2, "one model is always on the same side"
    after = page.state["judgements"]
    assert [after[name] - before[name] for name in ("pairs", "ties", "skips")] == [8, 4, 4]
    new = Path(after["file"]).read_text().splitlines(keepends=True)[-16:]
    (tmp_path / "new.jsonl").write_text("".join(new))
    assert Counter(read_pairs(tmp_path / "new.jsonl", tokenizer)) == Counter(expected)
    written = [json.loads(line) for line in new]
    assert [Path(line["source"]).name for line in written] == [
        f"questions.txt:{number % len(PROMPTS) + 1}" for number in range(16)
    ]
    for line in written:
        texts = line.get("tie") or line.get("skip") or [line["chosen"], line["rejected"]]
        assert texts == [greedy(model, line["prompt"]) for model in line["models"]], "a reply has the other's name"


def test_win_rate_is_that_of_a_hand_count(
    forks: Forks, folder: Path, other: Path, models: tuple[str, str], tmp_path: Path
) -> None:
    page = start(forks, folder, "--against", other, "--pairs", tmp_path / "new" / "mine.jsonl")
    points: list[float] = []
    for number, key in enumerate("11=2s1="):
        question, _ = page.ask(PROMPTS[number % len(PROMPTS)], temperature=1)
        answer = page.judge(question, key)
        if key != "s":
            points.append(0.5 if key == "=" else float(answer["models"][int(key) - 1] == models[1]))
    rate = answer["judgements"]["win_rate"]
    share, count, z = sum(points) / len(points), len(points), 1.959963984540054
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    assert (rate["share"], rate["labels"]) == (pytest.approx(share), 6)
    assert rate["interval"] == pytest.approx([middle - reach, middle + reach])
    assert page.server.end() == (0, "")


def test_question_is_judged_once(page: Page) -> None:
    file = Path(page.state["judgements"]["file"])
    question, _ = page.ask(0)
    page.judge(question, "1")
    before = file.read_bytes()
    assert page.judge(question, "2") == (409, "this question is judged already")
    assert page.judge("unknown", "1") == (404, "no such question here; ask again")
    assert page.judge(question, "3")[0] == 400
    assert file.read_bytes() == before


def test_replies_that_a_page_has_left_are_no_pair(page: Page) -> None:
    body = json.dumps({"prompt": 0, "max_tokens": 64}).encode()
    answers = []
    for _ in range(5):  # the server may be faster than this process
        request = urllib.request.Request(f"{page.server.address}/ui/ask", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            question = json.loads(response.readline().removeprefix(b"data: "))["question"]
        answers.append(page.judge(question, "="))
    assert (409, "the replies are not complete; wait, or ask again") in answers


def test_equal_replies_are_no_pair(forks: Forks, folder: Path, tmp_path: Path) -> None:
    page = start(forks, folder, "--against", folder, "--pairs", tmp_path / "labels.jsonl")
    question, replies = page.ask("the cat")
    assert replies[0] == replies[1]
    for key in "12":
        assert page.judge(question, key) == (409, "both replies are equal; press = or s")
    assert page.judge(question, "=")["judgements"]["win_rate"] is None, "one model has no win rate against itself"
    _, samples = page.ask("the cat", temperature=1, seed=5)
    alone = []
    for seed in (5, 6):
        request = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 12, "seed": seed}
        alone.append(page.server.post("/v1/chat/completions", request)[1]["choices"][0]["message"]["content"])
    assert sorted(samples) == sorted(alone) and alone[0] != alone[1]
    assert page.server.end() == (0, "")


def test_scores_are_those_of_transformers(page: Page, judge: Any, tokenizer: Any) -> None:
    question, replies = page.ask("the owl", max_tokens=6)
    scores = json.loads(page.post("score", {"question": question})[1])["scores"]
    for reply, score in zip(replies, scores):
        turns = [{"role": "user", "content": "the owl"}, {"role": "assistant", "content": reply}]
        ids = tokenizer.apply_chat_template(turns)["input_ids"][:-1]  # cut: without an end token
        with torch.no_grad():
            assert score == pytest.approx(float(judge[1](torch.tensor([ids])).logits[0, 0]), abs=1e-4)


def test_killed_server_has_lost_nothing_and_continues(
    forks: Forks, folder: Path, other: Path, questions: Path, tmp_path: Path
) -> None:
    file = tmp_path / "labels.jsonl"
    options = ("--against", other, "--prompts", questions, "--pairs", file)
    page = start(forks, folder, *options)
    for number, key in enumerate("1s="):
        assert page.state["next"] == number
        question, _ = page.ask(number)
        answer = page.judge(question, key)
        assert len(file.read_bytes().splitlines()) == number + 1, "an answer that is not on the disk yet"
        assert answer["next"] == number + 1
    os.kill(page.server.process.pid, signal.SIGKILL)
    page.server.process.communicate()
    with file.open("ab") as cut:
        cut.write(b'{"prompt": "half')
    again = start(forks, folder, *options)
    state = again.state
    assert state["next"] == 3
    assert [state["judgements"][name] for name in ("pairs", "ties", "skips")] == [1, 1, 1]
    labels = LabelFile(file)
    assert prompt_identity(PROMPTS[1]) not in labels.prompts and prompt_identity(PROMPTS[2]) in labels.prompts
    assert again.server.end() == (0, "")


def test_typed_conversation_is_read_back_as_it_was(page: Page, tokenizer: Any) -> None:
    talks = [
        [{"role": "user", "content": "Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}],
    ]
    replies = []
    for talk in talks:
        question, sides = page.ask(talk)
        replies.append(tuple(side.strip() for side in sides))  # as a source's replies in a conversation are
        assert json.loads(page.server.get(f"/ui/question?id={question}")[1])["messages"] == talk
        page.judge(question, "1")
        file = Path(page.state["judgements"]["file"])
        line = json.loads(file.read_text().splitlines()[-1])
        assert line["prompt"] == talk and line["source"] == "rlhf serve"
    pairs = [(chosen.strip(), rejected.strip()) for _, chosen, rejected in read_pairs(file, tokenizer)]
    assert set(replies) <= set(pairs)
    for bad in ([], [{"role": "user", "content": " "}], [*talks[1], {"role": "assistant", "content": "x"}]):
        status, text = page.post("ask", {"messages": bad})
        assert status == 400 and "messages" in json.loads(text)["error"]["message"]
    assert page.post("ask", {"prompt": len(PROMPTS)})[0] == 404


def test_only_the_pages_own_origin_may_ask(page: Page, forks: Forks, folder: Path) -> None:
    own = page.server.address
    port = own.rpartition(":")[2]
    body = {"prompt": 0, "max_tokens": 1}
    assert page.post("ask", body, Origin=own)[0] == 200
    assert page.post("ask", body, Origin=f"http://localhost:{port}", Host=f"localhost:{port}")[0] == 200
    strangers = ["null", "http://evil.example", "http://127.0.0.1:1", "http://127.0.0.1", f"https://127.0.0.1:{port}",
                 f"http://localhost:{port}", f"{own}.evil.example", f"http://evil.example:{port}"]  # fmt: skip
    for origin in strangers:
        for path in ("ask", "judge", "score"):
            assert page.post(path, body, Origin=origin)[0] == 403, origin
        assert page.server.get("/ui/state", Origin=origin)[0] == 403
    evil = f"evil.example:{port}"
    assert page.post("ask", body, Origin=f"http://{evil}", Host=evil)[0] == 403
    assert page.server.get("/", Host=evil)[0] == 403
    assert page.post("ask", body, **{"Content-Type": "text/plain"})[0] == 415
    plain = Server(forks, folder)
    assert plain.get("/")[0] == 404 and plain.get("/ui/state")[0] == 404
    assert plain.get("/v1/models", Origin=plain.address)[0] == 403
    assert plain.end() == (0, "")


def test_token_is_needed_for_all_but_the_pages_files(forks: Forks, folder: Path) -> None:
    page = start(forks, folder, "--host", "0.0.0.0", RLHF_SERVE_TOKEN="open sesame")
    for path in ("/", "/ui/page.js", "/ui/page.css"):
        assert page.server.get(path)[0] == 200
    for path in ("/ui/state", "/ui/prompt?number=0", "/ui/question?id=x", "/ui/state?token=open%20sesame"):
        assert page.server.get(path)[0] == 401
    for path in ("ask", "judge", "score"):
        assert page.post(path, {})[0] == 401
    assert page.server.get("/ui/state", Authorization="Bearer open sesame")[0] == 200
    assert page.server.end() == (0, "")


def test_page_may_load_and_run_its_own_files_only(page: Page) -> None:
    for path in ("/", "/ui/page.js", "/ui/page.css", "/ui/state"):
        with urllib.request.urlopen(page.server.address + path) as response:
            policy = dict(part.split(maxsplit=1) for part in response.headers["Content-Security-Policy"].split("; "))
            text = response.read().decode()
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
        }
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "access-control-allow-origin" not in response.headers
        assert "//" not in text.replace("// ", ""), "an address of another server"


def test_one_model_is_talked_to_and_not_judged(forks: Forks, folder: Path, greedy: Any, models: Any) -> None:
    page = start(forks, folder)
    question, replies = page.ask("no dog")
    assert replies == [greedy(models[0], "no dog")]
    assert page.state["judgements"] is None
    assert page.judge(question, "1") == (409, "one model alone is not judged; start the server with --against")
    status, text = page.post("score", {"question": question})
    assert status == 409 and "start the server with --reward-model" in text
    assert page.server.end() == (0, "")


def test_run_has_a_reward_model_and_held_out_prompts(forks: Forks, finished_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    page = start(forks, finished_run, "--against", finished_run / "sft", "--pairs", file, "--prompts", "heldout")
    state = page.state
    assert state["reward_model"] == str(finished_run) and state["next"] == 0
    first = (finished_run / "ppo" / "heldout.jsonl").read_text().splitlines()[0]
    heldout = {row["prompt"] for row in json.loads(first)["rows"]}
    (message,) = json.loads(page.server.get("/ui/prompt?number=0")[1])["messages"]
    assert any(message["content"] in prompt for prompt in heldout) and state["prompts"] >= len(heldout)
    question, _ = page.ask(0, max_tokens=2)
    assert len(json.loads(page.post("score", {"question": question})[1])["scores"]) == 2
    assert page.server.end() == (0, "")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--prompts", "x.txt"], "--prompts: is an option of the page; add --ui"),
        (["--ui", "--rollouts"], "--ui, --rollouts: a trainer would replace the weights that are judged"),
        (["--ui", "--pairs", "x.jsonl"], "--pairs: one model alone is not judged; name a second with --against"),
        (["--ui", "--prompts", "absent.txt"], "absent.txt"),
        (["--ui", "--prompts", "heldout"], "--prompts: missing, and none of the models is of a run"),
        (["--ui", "--against", "./absent"], "absent: no such folder"),
        (["--ui", "--reward-model", "./absent"], "absent: no such folder"),
        (["--ui", "--against", "MODEL", "--pairs", "MODEL/config.json/x.jsonl"], "choose another --pairs"),
        (["--ui", "--against", "MODEL", "--pairs", "MODEL/config.json"], "name another file with --pairs"),
    ],
)
def test_page_that_cannot_start_says_why(forks: Forks, folder: Path, options: list[str], line: str) -> None:
    words = [option.replace("MODEL", str(folder)) for option in options]
    process = forks.start("-m", "rlhf", "serve", str(folder), "--port", "8699", *words, environment={})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and line in errors and errors.count("\n") == 1, errors
