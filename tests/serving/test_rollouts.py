"""A trainer's calls: the server takes weights, draws and scores with them, and refuses everything else."""

from __future__ import annotations

import gc
import io
import subprocess
import tarfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from rlhf.config.schema import build_config
from rlhf.evaluation.models import EvaluationDevice, load_language_model
from rlhf.generation.decode_state import DecodeState
from rlhf.rollouts.protocol import Capabilities, Drawn, DrawRequest, Scored, ScoreRequest
from rlhf.serving.app import ServedModel
from rlhf.serving.decoder_rollouts import DecoderRollouts
from rlhf.serving.engine import Engine
from rlhf.serving.rollouts import RolloutService
from tests.helpers import llama

CALLS = "/rollouts/v1"
ROWS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> list[Path]:
    """Two models of one shape."""
    folders = []
    for seed in range(2):
        folders.append(tmp_path_factory.mktemp("model"))
        llama(len(tokenizer), seed=seed, initializer_range=0.3).save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


def make_adapter(base: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def pack(folder: Path, **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, file.name)
        for name, content in more.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sparse(folder: Path) -> bytes:
    """A tar of 10 KiB whose one file has 300 MiB."""
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(300 * 2**20)
    command = ["tar", "--sparse", "--format=gnu", "-cf", "-", "-C", str(folder), "model.safetensors"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def truth(model: Any, rows: list[list[int]]) -> np.ndarray:
    """The log-probabilities of the rows' tokens by plain transformers."""
    numbers = []
    for row in rows:
        with torch.no_grad():
            log_probs = model(torch.tensor([row])).logits[0, :-1].double().log_softmax(-1)
        numbers.append(log_probs[range(len(row) - 1), row[1:]].numpy())
    return np.concatenate(numbers)


class Server:
    """The application in this process, and its engine in a thread."""

    def __init__(self, folder: Path, accelerator: Any) -> None:
        device = EvaluationDevice(accelerator, accelerator.precision("fp32"), accelerator.shape_policy())
        config = build_config({})
        engine = Engine(load_language_model(folder, config, device), max_tokens=16, batch_size=8, max_waiting=8)
        self.engine, self.thread = engine, threading.Thread(target=engine.run)
        self.thread.start()
        self.receipt = ""
        self.service = RolloutService(DecoderRollouts(engine, "tiny", config))
        served = ServedModel(engine, "tiny", token=None, hosts=None, rollouts=self.service)
        self.client = TestClient(served.build())

    def put(self, content: bytes) -> Any:
        response = self.client.put(f"{CALLS}/weights", content=content)
        self.receipt = response.json().get("receipt", "")
        return response

    def score(self) -> np.ndarray:
        response = self.client.post(
            f"{CALLS}/score", content=ScoreRequest(receipt=self.receipt, rows=ROWS).model_dump_json(),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        assert response.status_code == 200, response.text
        return Scored.model_validate_json(response.content).log_probs

    def draw(self, **changes: Any) -> Any:
        tokens = 6
        uniform = torch.rand(len(ROWS) * tokens, generator=torch.Generator().manual_seed(0)).numpy()
        values: dict[str, Any] = {
            "receipt": self.receipt,
            "prompts": ROWS,
            "width": 8,
            "uniform": uniform,
            "tokens": tokens,
            "temperature": 1.0,
            "end_ids": [1],
        } | changes
        body = DrawRequest.model_construct(**values).model_dump_json(warnings=False)
        return self.client.post(f"{CALLS}/draw", content=body, headers={"Content-Type": "application/json"})


@pytest.fixture
def server(folders: list[Path], accelerator: Any) -> Iterator[Server]:
    server = Server(folders[0], accelerator)
    yield server
    server.engine.close()
    server.thread.join(60)


def test_scores_are_those_of_the_weights_received(server: Server, folders: list[Path]) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    receipts = set()
    for number in (1, 0, 1):
        assert server.put(pack(folders[number])).status_code == 200
        assert server.score() == pytest.approx(truth(models[number], ROWS), abs=1e-5)
        receipts.add(server.receipt)
    assert len(receipts) == 3, "each is another, of the same weights too"


def test_adapters_replace_each_other_on_the_first_model(server: Server, folders: list[Path], tmp_path: Path) -> None:
    from peft import PeftModel

    for number, (seed, rank) in enumerate([(3, 4), (4, 4), (3, 4), (5, 2)]):
        adapter = make_adapter(folders[0], tmp_path / f"adapter{number}", seed, rank)
        assert server.put(pack(adapter)).status_code == 200
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders[0]), adapter)
        assert server.score() == pytest.approx(truth(model, ROWS), abs=1e-5)
    server.put(pack(folders[1]))  # another run's
    assert server.put(pack(adapter)).status_code == 200
    assert server.score() == pytest.approx(truth(model, ROWS), abs=1e-5)


def test_drawn_log_probs_are_those_of_the_distribution(server: Server, folders: list[Path]) -> None:
    server.put(pack(folders[1]))
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    drawn = Drawn.model_validate_json(server.draw().content)
    assert drawn.receipt == server.receipt and len(drawn.rows) == len(ROWS)
    for prompt, row in zip(ROWS, drawn.rows):
        expected = truth(model, [prompt + row.ids])[len(prompt) - 1 :]
        assert row.log_probs == pytest.approx(expected, abs=1e-5)
        assert len(row.ids) == 6 or row.ids[-1] == 1


def test_capabilities_say_what_is_served(server: Server) -> None:
    has = Capabilities.model_validate_json(server.client.get(f"{CALLS}/capabilities").content)
    assert (has.model, has.precision, has.max_length) == ("tiny", "fp32", 128)


def test_nothing_is_drawn_from_other_weights(server: Server, folders: list[Path]) -> None:
    assert server.draw(receipt="").status_code == server.draw(receipt="a").status_code == 409, "none were received"
    server.put(pack(folders[1]))
    first = server.receipt
    server.put(pack(folders[1]))  # of another trainer
    response = server.draw(receipt=first)
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "other weights are loaded than those of this receipt"
    last = server.receipt
    broken = pack(folders[1]).replace(b"model.norm.weight", b"model.norm.nothing")
    assert server.put(broken).status_code >= 400
    assert server.draw(receipt=last).status_code == 409


def test_weights_that_cannot_be_loaded_leave_the_model_of_the_start(
    server: Server, folders: list[Path], tokenizer: Any, tmp_path: Path
) -> None:
    wide = tmp_path / "wide"
    llama(len(tokenizer), hidden_size=48).save_pretrained(wide)
    prompt = {"prompt": ROWS[0], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    expected = server.client.post("/v1/completions", json=prompt).json()["choices"][0]["token_ids"]
    last = make_adapter(folders[0], tmp_path / "adapter", 0)
    tensors = load_file(last / "adapter_model.safetensors")
    name = max(tensors)  # all but this one fit
    save_file(tensors | {name: torch.zeros(7, 7)}, last / "adapter_model.safetensors")
    server.put(pack(folders[1]))
    for folder in (make_adapter(wide, tmp_path / "other", 0), last):
        response = server.put(pack(folder))
        assert response.status_code == 400 and "the adapter is of another shape" in response.json()["error"]["message"]
        served = server.client.post("/v1/completions", json=prompt).json()["choices"][0]["token_ids"]
        assert served == expected
    assert server.put(pack(folders[1]).replace(b"model.norm.weight", b"model.norm.nothing")).status_code >= 400
    served = server.client.post("/v1/completions", json=prompt).json()["choices"][0]["token_ids"]
    assert served == expected
    assert server.put(pack(make_adapter(folders[0], tmp_path / "right", 0))).status_code == 200


def test_only_one_model_is_kept(server: Server, folders: list[Path]) -> None:
    models: list[Any] = []
    gc.disable()
    try:
        for number in (1, 0, 1, 0):
            server.put(pack(folders[number]))
            server.draw()
            models.append(weakref.ref(server.engine.model.module))
        assert [model() is None for model in models] == [True, True, True, False]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[5], [10**6], [7]]}, "a token id is not from 0 to "),
        ({"prompts": [[5], [-1], [7]]}, "a token id is not from 0 to "),
        ({"width": 3}, "do not fit"),
        ({"width": 10**9}, "do not fit into a context of 128"),
        ({"tokens": 125, "uniform": np.zeros(375, np.float32)}, "do not fit into a context of 128"),
        ({"uniform": np.zeros(5, np.float32)}, "uniform: must have a number for each token"),
        ({"uniform": np.full(18, 1.5, np.float32)}, "uniform: must have numbers in [0, 1)"),
        ({"uniform": np.full(18, np.nan, np.float32)}, "uniform: must have numbers in [0, 1)"),
        ({"prompts": []}, "not a DrawRequest"),
        ({"temperature": -1.0}, "not a DrawRequest"),
    ],
)
def test_wrong_draw_is_refused(server: Server, folders: list[Path], changes: dict[str, Any], message: str) -> None:
    server.put(pack(folders[1]))
    response = server.draw(**changes)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_weights_that_are_none_are_refused(server: Server, folders: list[Path], tmp_path: Path) -> None:
    good = pack(folders[0])
    outside = tmp_path / "outside.json"
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w") as tar:
        info = tarfile.TarInfo("model.safetensors")
        info.type, info.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(info)
    cases = {
        "empty": b"",
        "no tar": b"a" * 2000,
        "cut": good[: len(good) // 2],
        "code": pack(folders[0], **{"modeling.py": b"print()"}),
        "path": pack(folders[0], **{f"../{outside.name}": b"{}"}),
        "absolute": pack(folders[0], **{str(outside): b"{}"}),
        "hidden": pack(folders[0], **{".json": b"{}"}),
        "twice": pack(folders[0], **{"config.json": b"{}"}),
        "pickle": pack(folders[0], **{"pytorch_model.bin": b"{}"}),
        "link": link.getvalue(),
        "sparse": sparse(tmp_path),
        "large": good + bytes(100 * 2**20),
    }
    statuses = {name: server.put(content).status_code for name, content in cases.items()}
    assert statuses == dict.fromkeys(cases, 400) | {"large": 413}
    assert not outside.exists()


def test_calls_are_not_served_without_the_option(folders: list[Path], accelerator: Any) -> None:
    device = EvaluationDevice(accelerator, accelerator.precision("fp32"), accelerator.shape_policy())
    engine = Engine(
        load_language_model(folders[0], build_config({}), device), max_tokens=4, batch_size=1, max_waiting=1
    )
    client = TestClient(ServedModel(engine, "tiny", token=None, hosts=None).build())
    assert client.get(f"{CALLS}/capabilities").status_code == 404
    assert client.put(f"{CALLS}/weights", content=b"").status_code == 404


def test_interrupt_ends_the_batch_that_is_being_drawn(server: Server, folders: list[Path], monkeypatch: Any) -> None:
    server.put(pack(folders[1]))
    steps, step = [], DecodeState.step

    def interrupted(state: Any) -> None:
        step(state)
        steps.append(state.step_count)
        if len(steps) == 2:
            server.service.interrupt()

    monkeypatch.setattr(DecodeState, "step", interrupted)
    tokens = 40
    response = server.draw(tokens=tokens, uniform=np.zeros(len(ROWS) * tokens, np.float32), end_ids=[])
    assert response.status_code == 503 and "the server is ending" in response.text
    assert len(steps) < 10
    assert server.draw().status_code == 503 and len(steps) < 10
