"""Rollouts by vLLM, in a separate process and Python environment, because it pins torch.

An adapter gets a new name for each hand-over, because vLLM keeps the old one under a name that it knows. Random numbers
of a trainer cannot be passed on: vLLM draws with its own, from a seed that those of the row decide. So a completion
does not depend on the server, but differs from the one that our decoder draws.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.errors import ModelError, RunError
from rlhf.models.tokenizers import digest_vocabulary, load_tokenizer
from rlhf.rollouts.protocol import Capabilities, DrawnRow, DrawRequest, ScoreRequest
from rlhf.serving.rollouts import digest_weights
from rlhf.utils.atomic_io import read_json

_START = 1800.0  # seconds until it answers: it may compile first
_CALL = 600.0  # seconds of a call
_ROWS = 256  # completions asked for at a time
_RANK = 64  # of the largest adapter, unless the options say otherwise
_BASE = "base"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_NAMES_ERROR = re.compile(r"\b\w*(Error|Exception): ")
_NO_ERROR = re.compile(r"\b(WARNING|INFO|EngineDeadError)\b")


class VLLMRollouts:
    """A model behind vLLM; a `rlhf.serving.rollouts.RolloutModel`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        python: str,
        precision: str | None,
        options: Sequence[str],
        say: Callable[[str], object],
    ) -> None:
        """Start vLLM and wait until it answers.

        Args:
            folder: of a whole model.
            name: the model's name in capabilities.
            python: interpreter of the environment with vLLM.
            precision: name of a precision; None for that of the model's files.
            options: more options of vLLM's server.
            say: prints a line.

        Raises:
            ModelError: the folder has an adapter, or no language model.
            RunError: vLLM ends, or does not answer in time.
        """
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{folder}: is an adapter, and vLLM starts from a whole model; merge it into its model with peft's "
                "merge_and_unload, and save that"
            )
        config = read_json(folder / "config.json")
        text = config.get("text_config", config)
        if "vocab_size" not in text:
            raise ModelError(f"{folder}: config.json names no vocab_size; is it a language model?")
        kept = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        names = {dtype: short for short, dtype in _DTYPES.items()}
        tokenizer = digest_vocabulary(load_tokenizer(str(folder))[0])
        self._base, self._python, self._options, self._say = folder, python, tuple(options), say
        self._dtype = _DTYPES.get(precision or "", kept)
        self._files = tempfile.TemporaryDirectory(prefix="rlhf-vllm-")  # of this user alone
        self._log, self._socket = Path(self._files.name, "log"), Path(self._files.name, "socket")
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._takes_adapters = True
        self._served, self._handed_over = _BASE, 0
        self.vocabulary = int(text["vocab_size"])
        self.max_upload = 4 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) + 64 * 2**20
        try:
            self._start()
            models = self._call("GET", "/v1/models")["data"]
            version = self._call("GET", "/version")["version"]
        except BaseException:
            self.stop()
            raise
        self.capabilities = Capabilities(
            model=name,
            start=digest_weights(folder),
            vocabulary=self.vocabulary,
            tokenizer=tokenizer,
            max_length=int(models[0]["max_model_len"]) - 1,  # scoring a row draws a token after it
            accelerator=f"vLLM {version}",
            precision=names.get(self._dtype, self._dtype),
        )

    # --- the process

    def run(self) -> None:
        """Wait until `close` is called.

        Raises:
            RunError: vLLM has ended before.
        """
        while not self._ended.wait(0.5):
            process = self._process
            if process and process.poll() is not None and self._process is process:
                raise self._failure("vLLM has ended")

    def close(self) -> None:
        """Let `run` return."""
        self._ended.set()

    def interrupt(self) -> None:
        """End vLLM, so that the call that it answers fails."""
        self._ended.set()
        self._end_process()

    def stop(self) -> None:
        """End vLLM, and delete the weights that it was given."""
        self._end_process()
        self._files.cleanup()

    def _start(self) -> None:
        # A socket in a folder of this user: vLLM guards only some of its paths with a key.
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(self._socket)]
        command += ["--model", str(self._base), "--served-model-name", _BASE, "--dtype", self._dtype]
        # Of the distribution that a token is drawn from, and which the request alone decides.
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if self._takes_adapters:
            command += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", str(_RANK)]
        environment = os.environ | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # which has reload_weights
            "VLLM_NO_USAGE_STATS": "1",
        }
        environment.pop("PYTHONPATH", None)  # of this environment
        if self._ended.is_set():
            raise RunError("the server is ending")
        self._socket.unlink(missing_ok=True)
        self._read = 0  # bytes of the log before the last answer
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_SUPERVISOR), self._files.name, *command, *self._options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START
        while not self._is_ready():
            if self._ended.is_set():
                raise RunError("the server is ending")
            if self._process is None or self._process.poll() is not None:
                raise self._failure("vLLM cannot serve the model")
            if time.monotonic() > deadline:
                raise self._failure(f"vLLM has not answered within {_START:g} seconds")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return self._request("GET", "/health", None, 10)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _end_process(self, *, keep_files: bool = False) -> None:
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(OSError):  # it has ended
                process.communicate(b"keep" if keep_files else None)

    def _failure(self, what: str) -> RunError:
        """Return an error with the first one in vLLM's log since the last call that it has answered.

        What follows it there says that a process has ended, and refers to it.
        """
        content = self._log.read_bytes() if self._log.exists() else b""  # which is deleted as vLLM ends
        lines = content[self._read :].decode(errors="replace").splitlines()
        named = [line for line in lines if _NAMES_ERROR.search(line) and not _NO_ERROR.search(line)]
        reason = (named or lines[-1:] or ["its log is empty"])[0]
        return RunError(f"{what}: {reason.split('] ')[-1].strip()[:300]}")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of vLLM's answer; None if it is no JSON.

        Raises:
            RunError: the status is not 200, or there is no answer.
        """
        try:
            status, content = self._request(method, path, body, _CALL)
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"vLLM does not answer {path}: {type(error).__name__} {error}") from error
        if status >= 500:  # the reason is in the log alone
            raise self._failure(f"vLLM fails at {path}")
        if status != 200:
            raise RunError(f"vLLM refuses {path}: {content[:300].decode(errors='replace')}")
        self._read = self._log.stat().st_size
        try:
            return json.loads(content)
        except ValueError:
            return None

    def _request(self, method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        connection = _UnixConnection(self._socket, timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    # --- weights

    def load(self, folder: Path) -> None:
        """Load the weights in a folder, an adapter's or a whole model's; if that fails, those of the start."""
        is_adapter = (folder / "adapter_config.json").is_file()
        self._handed_over += 1
        kept = Path(self._files.name, f"policy-{self._handed_over}")  # vLLM may read it again
        shutil.move(folder, kept)
        try:
            if is_adapter != self._takes_adapters:
                self._say(f"restarting vLLM {'with' if is_adapter else 'without'} adapters")
                self._takes_adapters = is_adapter
                self._restart()
            if is_adapter:
                self._load_adapter(kept)
            else:
                self._call(
                    "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(kept)}}
                )
                if not self._call("POST", "/reset_prefix_cache", {})["success"]:
                    raise RunError("vLLM did not reset its prefix cache, which the old weights have filled")
        except Exception:
            shutil.rmtree(kept, ignore_errors=True)
            self._restart()
            raise
        for older in Path(self._files.name).glob("policy-*"):
            if older != kept:
                shutil.rmtree(older)

    def _load_adapter(self, folder: Path) -> None:
        before, name = self._served, folder.name
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._served = name
        if before != _BASE:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": before})

    def _restart(self) -> None:
        self._end_process(keep_files=True)
        self._served = _BASE
        self._start()

    # --- rows

    def draw(self, asked: DrawRequest) -> list[DrawnRow]:
        """Return a completion of each prompt."""
        numbers = asked.uniform.reshape(len(asked.prompts), asked.tokens)
        with ThreadPoolExecutor(min(_ROWS, len(asked.prompts))) as threads:
            return list(threads.map(lambda prompt, own: self._draw_row(asked, prompt, own), asked.prompts, numbers))

    def _draw_row(self, asked: DrawRequest, prompt: list[int], numbers: np.ndarray) -> DrawnRow:
        body = {
            "model": self._served,
            "prompt": prompt,
            "max_tokens": asked.tokens,
            "temperature": asked.temperature,
            "seed": zlib.crc32(numbers.tobytes()),
            "stop_token_ids": asked.end_ids,
            "ignore_eos": True,  # only the trainer's end tokens count
            "logprobs": 0,  # of the drawn token
            "return_token_ids": True,
        }
        (choice,) = self._call("POST", "/v1/completions", body)["choices"]
        return DrawnRow(ids=choice["token_ids"], log_probs=np.array(choice["logprobs"]["token_logprobs"], np.float32))

    def score(self, asked: ScoreRequest) -> np.ndarray:
        """Return the log-probabilities of the rows' tokens.

        One row after the other: vLLM 0.32 for CPUs ends if it scores two with an adapter in one batch.
        """
        body = {"model": self._served, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1}
        numbers: list[float] = []
        for row in asked.rows:
            (choice,) = self._call("POST", "/v1/completions", {**body, "prompt": row})["choices"]
            places = zip(row[1:], choice["prompt_logprobs"][1:], strict=True)
            numbers += [place[str(token)]["logprob"] for token, place in places]
        return np.array(numbers, np.float32)


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a socket in the file system."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
