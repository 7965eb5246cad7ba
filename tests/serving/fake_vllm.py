"""Stands for vLLM's server, as far as `rlhf.serving.vllm` calls it: log-probabilities tell which weights have answered.

Started as `python -m vllm.entrypoints.openai.api_server`. It writes each call to the file `FAKE_VLLM_CALLS`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any, ClassVar

parser = argparse.ArgumentParser()
parser.add_argument("--uds")
parser.add_argument("--enable-lora", action="store_true")
CONTEXT = 64
OPTIONS = parser.parse_known_args()[0]
CALLS = Path(os.environ["FAKE_VLLM_CALLS"])
if "FAKE_VLLM_BROKEN" in os.environ:
    raise SystemExit(
        "WARNING This can cause errors like `OSError: [Errno 24] Too many open files`\n"
        "ERROR [core.py:1] ValueError: this model is not supported\n"
        "RuntimeError: Engine core initialization failed. See root cause above."
    )


class Handler(BaseHTTPRequestHandler):
    adapters: ClassVar[dict[str, float]] = {}
    reloaded = 0.0

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        with CALLS.open("a") as file:
            file.write(json.dumps([self.path, body]) + "\n")
        return self.answer(*self.respond(body))

    do_POST = do_GET

    def respond(self, body: Any) -> tuple[int, Any]:
        name = body.get("lora_name")
        if self.path == "/v1/models":
            return 200, {"data": [{"id": "base", "max_model_len": CONTEXT}]}
        if self.path == "/version":
            return 200, {"version": "0"}
        if self.path == "/v1/load_lora_adapter":
            if name in self.adapters or not OPTIONS.enable_lora:
                return 400, {"error": {"message": f"{name} has already been loaded"}}
            self.adapters[name] = read_number(body["lora_path"])
            return 200, "Success"
        if self.path == "/v1/unload_lora_adapter":
            del self.adapters[name]
        if self.path == "/collective_rpc":
            Handler.reloaded = read_number(body["kwargs"]["weights_path"])
        if self.path == "/reset_prefix_cache":
            return 200, {"success": True}
        if self.path != "/v1/completions":
            return 200, {}
        if len(body["prompt"]) + body["max_tokens"] > CONTEXT:
            return 400, {"error": {"message": "the prompt is too long"}}
        time.sleep(float(os.environ.get("FAKE_VLLM_SECONDS", 0)))
        value = self.reloaded if body["model"] == "base" else self.adapters[body["model"]]
        if "prompt_logprobs" in body:
            scored = [None, *({str(token): {"logprob": value}} for token in body["prompt"][1:])]
            return 200, {"choices": [{"prompt_logprobs": scored}]}
        ids = [body["seed"] % 7 + 3, *body["stop_token_ids"][:1]]
        return 200, {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [value] * 2}}]}

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def read_number(folder: str) -> float:
    """The number in a folder of weights."""
    return float(json.loads(Path(folder, "number.json").read_text()))


ThreadingUnixStreamServer(OPTIONS.uds, Handler).serve_forever()
