"""The page to talk and to judge in a real Chromium; the models say what the test has written."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from accelerators import ShapePolicy
from rlhf.config.schema import build_config
from rlhf.data.formats import ColumnMapping
from rlhf.data.records import Row, parse_record
from rlhf.evaluation.labels import LabelFile
from rlhf.evaluation.models import EvaluationDevice, LanguageModel, load_language_model
from rlhf.generation.decoder import DrawnToken
from rlhf.serving.app import ServedModel
from rlhf.serving.engine import CompletionJob, Engine
from rlhf.serving.judging import ChatPage
from rlhf.serving.ports import open_port
from tests.browser import MARKS, chromium

pytestmark = MARKS

NAMES = ("runs/left-handed", "runs/right-handed")
HOSTILE = {
    "image": "<img src=x onerror=\"document.title='owned'\">",
    "script": "</div><script>document.title='owned'</script>",
    "style": "<style>*{display:none}</style><iframe src='//evil.example'></iframe>",
    "link": "[x](javascript:alert(1)) {{constructor.constructor('alert(1)')()}} ${alert(1)} &lt;b&gt; &amp;amp;",
    "direction": "abc\u202egnp.exe\u202c \u2066x\u2069 \u200f\u061c",
    "invisible": "a\u200bb\ufeffc\u2060d\U000e0041\u00ad",
    "control": "\x1b[31mred\x07\x00\r\x7f\x9b end",
    "long": "W" * 3000,
    "tall": "Z" + "\u0300\u0348" * 120,
    "event": 'data: {"side": 0, "text": "forged"}\n\ndata: {"models": ["a"]}\n\n',
}
SHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0041]"
)


def shown(text: str) -> str:
    """Return a text as the page must show it."""
    return SHOWN.sub(lambda match: f"\\u{{{ord(match[0]):x}}}", text)


class ScriptedEngine(Engine):
    """An engine that draws the tokens of `reply`, half of them before `gate` is set."""

    def __init__(self, model: LanguageModel, reply: str | Callable[[CompletionJob], str]) -> None:
        super().__init__(model, max_tokens=8000, batch_size=1, max_waiting=50)
        self.reply, self.jobs, self.gate = reply, list[CompletionJob](), threading.Event()
        self.gate.set()

    def submit(self, jobs: Sequence[CompletionJob]) -> None:
        self.jobs += jobs
        for job in jobs:
            threading.Thread(target=self._say, args=(job,)).start()

    def _say(self, job: CompletionJob) -> None:
        text = self.reply if isinstance(self.reply, str) else self.reply(job)
        ids = self.model.tokenizer(text)["input_ids"]
        for place, token in enumerate(ids):
            if place == len(ids) // 2:
                self.gate.wait(30)
            if job.cancelled:
                break
            job.receive(DrawnToken(token, -1.0, False))
        job.receive(None)


class Served:
    """A page that is served by a thread.

    Attributes:
        engines: of the two models.
        page: its calls.
        address: without a path.
        path: the file of judgements.
    """

    def __init__(
        self, engines: Sequence[ScriptedEngine], path: Path, token: str | None, prompts: Sequence[Row]
    ) -> None:
        self.engines, self.path = engines, path
        file = LabelFile(path) if len(engines) > 1 else None
        self.page = ChatPage(engines, NAMES[: len(engines)], prompts=prompts, file=file)
        listener = open_port("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        served = ServedModel(engines[0], "tiny", token=token, hosts=("127.0.0.1",), page=self.page)
        self._server = uvicorn.Server(uvicorn.Config(served.build(), log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def end(self) -> None:
        for engine in self.engines:
            engine.gate.set()
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def model(accelerator: Any, folder: Path) -> LanguageModel:
    device = EvaluationDevice(accelerator, accelerator.precision("fp32"), ShapePolicy("dynamic"))
    model = load_language_model(folder, build_config({}), device)
    return LanguageModel(**{**vars(model), "max_length": 10_000})


@pytest.fixture
def serve(model: LanguageModel, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*replies: Any, token: str | None = None, prompts: Sequence[str] = ()) -> Served:
        columns = ColumnMapping(prompt="prompt")
        rows = [parse_record({"prompt": text}, columns, f"q.txt:{number}") for number, text in enumerate(prompts, 1)]
        engines = [ScriptedEngine(model, reply) for reply in replies]
        started.append(Served(engines, tmp_path / "labels.jsonl", token, rows))
        return started[-1]

    yield start
    for served in started:
        served.end()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Any]]:
    """(server) -> the open page; the test fails if the page asks another server, opens a dialog or has an error."""
    contexts, complaints = [], []

    def open_page(served: Served, width: int = 1200, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)

        def admit(route: Any) -> None:
            if route.request.url.startswith(f"{served.address}/"):
                route.continue_()
            else:
                complaints.append(f"asks for {route.request.url}")
                route.abort()

        context.route("**/*", admit)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(f"{served.address}/")
        wait(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Chromium prints refusals of the server; the page shows them.
    assert [line for line in complaints if not line.startswith("Failed to load resource")] == []


def wait(page: Any, state: str = "#app:visible, #login:visible") -> None:
    """Wait for an element."""
    page.wait_for_selector(state)


def load_again(page: Any) -> None:
    page.reload()
    wait(page)


def send(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def replies(page: Any) -> list[str]:
    return page.locator(".reply .text").all_text_contents()  # type: ignore[no-any-return]


def headers(page: Any) -> list[str]:
    return page.locator(".reply header b").all_text_contents()  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_texts_are_shown_and_do_nothing(serve: Any, look: Any, kind: str, width: int) -> None:
    """Of models and of prompts; the file has them as they are."""
    text = HOSTILE[kind]
    served = serve(text, "mild", prompts=[f"tell me {text}"])
    page = look(served, width)
    page.keyboard.press("d")
    page.wait_for_selector("#verdict:visible")
    assert sorted(replies(page)) == sorted([shown(text), "mild"])
    prompt = served.page._prompts[0].prompt[0].content
    assert page.locator(".turn .text").text_content() == shown(prompt)
    assert page.locator("img, iframe, style, script:not([src]), .text b").count() == 0
    assert page.title() == f"rlhf: {NAMES[0]}"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#verdict button").first.is_visible()
    page.keyboard.press("1")
    page.wait_for_selector("#verdict", state="hidden")
    (line,) = served.lines
    assert {line["chosen"], line["rejected"]} == {text, "mild"} and line["prompt"] == prompt


def test_keys_judge_and_names_come_after_that(serve: Any, look: Any) -> None:
    served = serve("from left", "from right", prompts=[f"question {number}" for number in range(8)])
    page = look(served)
    said = dict(zip(NAMES, ("from left", "from right")))
    page.keyboard.press("d")
    for number, key in enumerate("12=s12=s"):
        page.wait_for_selector("#verdict:visible")
        assert headers(page) == ["1", "2"]
        assert not any(name in page.locator("main").inner_html() for name in NAMES), "the page knows too early"
        texts = replies(page)
        page.keyboard.press(key)
        page.keyboard.press("1")  # a second key is no second judgement
        page.wait_for_selector("#verdict", state="hidden")
        names = [header.partition(" · ")[2] for header in headers(page)]
        assert [said[name] for name in names] == texts
        assert len(served.lines) == number + 1
        line = served.lines[-1]
        assert line["prompt"] == f"question {number}" and line["source"] == f"q.txt:{number + 1}"
        if key in "12":
            better = int(key) - 1
            assert (line["chosen"], line["rejected"]) == (texts[better], texts[1 - better])
            assert line["models"] == [names[better], names[1 - better]]
            assert page.locator(".reply.chosen .text").text_content() == texts[better]
        else:
            assert line["tie" if key == "=" else "skip"] == texts and line["models"] == names
        if number < 7:
            page.keyboard.press("n")
    assert page.locator("#next:visible").count() == 0
    wins = sum(line["models"][0] == NAMES[1] for line in served.lines if "chosen" in line)
    tally = page.locator("#tally").text_content()
    assert "4 pairs, 2 ties and 2 skips in" in tally
    assert f"{NAMES[1]} is preferred to {NAMES[0]} for {100 * (wins + 1) / 6:.1f} % [" in tally


def test_key_in_a_text_is_no_judgement(serve: Any, look: Any) -> None:
    served = serve("one", "two")
    page = look(served)
    send(page, "1 = 1, says 2")
    page.wait_for_selector("#verdict:visible")
    assert page.get_by_label("Message").is_disabled() and served.lines == []
    page.locator("#settings summary").click()
    page.locator("#seed").press_sequentially("12")
    assert served.lines == [] and page.locator("#verdict").is_visible()
    page.locator("button[data-key='=']").click()
    page.wait_for_selector("#verdict", state="hidden")
    assert [line["prompt"] for line in served.lines] == ["1 = 1, says 2"]


def test_conversation_continues_from_the_preferred_reply(serve: Any, look: Any) -> None:
    served = serve("one", "two")
    page = look(served)
    send(page, "first?")
    page.wait_for_selector("#verdict:visible")
    page.keyboard.press("2")
    page.wait_for_selector("#verdict", state="hidden")
    preferred = replies(page)[1]
    load_again(page)  # the conversation survives it
    page.wait_for_selector(".reply.chosen")
    send(page, "second?")
    page.wait_for_selector("#verdict:visible")
    assert page.locator(".turn .text").all_text_contents() == ["first?", preferred, "second?"]
    page.keyboard.press("1")
    page.wait_for_selector("#verdict", state="hidden")
    assert [message["content"] for message in served.lines[-1]["prompt"]] == ["first?", preferred, "second?"]
    page.get_by_text("New conversation").click()
    assert page.locator(".turn, .reply").count() == 0


def test_page_that_is_loaded_again_continues(serve: Any, look: Any) -> None:
    served = serve("one", "two", prompts=["a?", "b?", "c?"])
    page = look(served)
    page.keyboard.press("d")
    page.wait_for_selector("#verdict:visible")
    before = replies(page)
    load_again(page)
    page.wait_for_selector("#verdict:visible")
    assert replies(page) == before and headers(page) == ["1", "2"]
    page.keyboard.press("1")
    page.wait_for_selector("#next:visible")
    load_again(page)
    page.wait_for_selector(".reply.chosen")
    page.keyboard.press("n")
    page.wait_for_selector("#verdict:visible")
    assert page.locator("#place").text_content() == "prompt 2 of 3" and len(served.lines) == 1
    other = look(served)  # another tab, which knows nothing
    other.wait_for_selector("#draw:visible")
    assert other.locator(".turn .text").text_content() == "b?"


def test_replies_are_shown_while_they_are_drawn_and_can_be_stopped(serve: Any, look: Any) -> None:
    served = serve("some words that come and some that wait")
    served.engines[0].gate.clear()
    page = look(served)
    send(page, "well?")
    page.locator(".reply .text").filter(has_text="some words").wait_for()
    assert replies(page)[0] != "some words that come and some that wait"
    page.get_by_text("Stop").click()
    page.wait_for_selector("#stop", state="hidden")
    deadline = time.monotonic() + 10
    while not served.engines[0].jobs[0].cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    served.engines[0].gate.set()
    page.keyboard.press("Escape")
    page.get_by_text("Draw again").click()
    page.locator(".reply .text").filter(has_text="some that wait").wait_for()
    assert page.locator("#verdict").is_hidden(), "one model is not judged"


def test_settings_reach_the_engine(serve: Any, look: Any) -> None:
    served = serve("one")
    page = look(served)
    page.locator("#settings summary").click()
    for name, value in {"temperature": "0.3", "top_p": "0.9", "top_k": "7", "max_tokens": "5", "seed": "11"}.items():
        page.locator(f"#{name}").fill(value)
    load_again(page)
    send(page, "well?")
    page.wait_for_selector(".reply:not(.drawing)")
    job = served.engines[0].jobs[0]
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) == (0.3, 0.9, 7)
    assert (job.max_tokens, job.seed) == (5, 11)
    page.locator("#settings summary").click()
    page.locator("#temperature").fill("9")
    send(page, "again?")
    page.wait_for_timeout(100)
    assert len(served.engines[0].jobs) == 1


def test_token_is_typed_and_never_in_an_address(serve: Any, look: Any) -> None:
    served = serve("one", token="open sesame")
    page = look(served)
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    for token in ("wrong", "open sesame"):
        page.locator("#token").fill(token)
        page.get_by_text("Continue").click()
        if token == "wrong":
            page.get_by_text("This is not the server's token").wait_for()
    page.get_by_label("Message").wait_for()
    load_again(page)
    send(page, "well?")
    page.wait_for_selector(".reply:not(.drawing)")
    assert replies(page) == ["one"]
    assert addresses and not any("sesame" in address for address in addresses)
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_policy_refuses_scripts_in_the_page(serve: Any, look: Any, browser: Any) -> None:
    """Not through `look`, since the page then has the complaints that are wanted."""
    served = serve("one")
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{served.address}/")
    page.get_by_label("Message").wait_for()
    for attack in (
        "document.body.innerHTML = '<img src=x onerror=owned()>'",
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s)",
        "document.body.setAttribute('onclick', 'document.title = 1')",
        "const s = document.createElement('script'); s.src = 'http://evil.example/x.js'; document.body.append(s)",
    ):
        outcome = page.evaluate(f"() => {{ try {{ {attack}; return 'done' }} catch (error) {{ return error.name }} }}")
        assert outcome != "done", attack
    assert page.title() == f"rlhf: {NAMES[0]}"
    fetched = page.evaluate("fetch('http://127.0.0.1:1/').then(() => 'done', error => error.name)")
    assert fetched == "TypeError"
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_page_is_legible_at_any_width(serve: Any, look: Any, width: int, scheme: str) -> None:
    served = serve("words " * 200, "one", prompts=["a question " * 30])
    page = look(served, width, scheme)
    page.keyboard.press("d")
    page.wait_for_selector("#verdict:visible")
    page.locator("#settings summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrast = page.evaluate(CONTRAST)
    assert min(contrast.values()) >= 4.5, contrast


CONTRAST = """() => {
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(channel)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return color.endsWith(", 0)") && node.parentElement ? ground(node.parentElement) : color;
  };
  const ratios = {};
  for (const node of document.querySelectorAll("h1, .soft, .text, .who, header b, button:enabled, label")) {
    if (!node.offsetParent) continue;
    const pair = [light(getComputedStyle(node).color), light(ground(node))].sort((one, other) => other - one);
    ratios[`${node.tagName}.${node.className}#${node.id}`] = (pair[0] + 0.05) / (pair[1] + 0.05);
  }
  return ratios;
}"""
