"""PPO whose rollouts are drawn by servers is the same run, whatever happens to the servers."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from accelerators.backends.cpu.info import native_bf16
from rlhf.reporting.step_records import read_steps
from tests.forks import Forks
from tests.helpers import assert_same_weights, llama, sets, start, user_environment
from tests.serving.processes import Server
from tests.trainers.test_keys import RECORDS, table

CALLS = "/rollouts/v1"


def where(*servers: Any) -> str:
    return f"ppo.rollout.where={json.dumps([server.address for server in servers])}"


def copy(begun: Path, folder: Path) -> Path:
    shutil.copytree(begun, folder)
    return folder


def steps(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "draw_gap" in record]


def assert_same_run(run: Path, expected: Path) -> None:
    """The same completions have the same rewards; numbers differ by rounding only."""
    for record, other in zip(steps(run), steps(expected), strict=True):
        assert record["tokens"] == other["tokens"]
        assert record["reward"] == pytest.approx(other["reward"], abs=1e-4)
        assert record["kl"] == pytest.approx(other["kl"], abs=1e-3)
    assert_same_weights(run / "ppo" / "model", expected / "ppo" / "model", atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        pytest.param([], 1, id="files"),
        pytest.param(["lora.rank=4"], 1, id="adapter"),
        pytest.param(["lora.rank=4", "ppo.rollout.weights=files"], 1, id="merged", marks=pytest.mark.slow),
        pytest.param(["engine.zero_stage=3"], 2, id="files-zero-3-two-ranks", marks=pytest.mark.slow),
        pytest.param(["engine.zero_stage=2", "lora.rank=4"], 2, id="adapter-two-ranks", marks=pytest.mark.slow),
    ],
)
def test_run_is_that_without_servers(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path, keys: list[str], ranks: int
) -> None:
    servers = serve(), serve()
    here = [key for key in keys if "rollout" not in key]
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    rlhf("ppo", "--output", expected, "--ranks", ranks, *sets(*here))
    done = rlhf("ppo", "--output", run, "--ranks", ranks, *sets(*keys, where(*servers)))
    assert_same_run(run, expected)
    records = steps(run)
    assert all(record["handover_gap"] < 1e-5 and record["rollout_servers"] == 2 for record in records)
    slopes = [record["handover_slope"] for record in records if "handover_slope" in record]
    assert slopes and slopes == pytest.approx([1] * len(slopes), abs=1e-2)
    assert all(f"rollouts by {server.address}: tiny on cpu in fp32" in done.stdout for server in servers)
    assert not list((run / "ppo").glob("rollout-weights*")), "nothing is left"


@pytest.mark.slow
def test_killed_server_is_replaced_by_the_other_and_comes_back(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path
) -> None:
    servers = [serve(), serve()]
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    rlhf("ppo", "--output", expected, *sets("ppo.steps=30"))
    process = start(rlhf, "ppo", "--output", run, *sets("ppo.steps=30", "ppo.log_every=1", where(*servers)))
    wait_for_step(run, 3, process)
    os.killpg(servers[0].process.pid, signal.SIGKILL)
    wait_for_step(run, len(steps(run)) + 2, process)
    serve(port=int(servers[0].address.rpartition(":")[2]))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert_same_run(run, expected)
    used = [record["rollout_servers"] for record in steps(run)]
    assert used[0] == used[-1] == 2 and 1 in used, used
    assert f"rollout server {servers[0].address}: " in output


def wait_for_step(run: Path, step: int, process: Any) -> None:
    deadline = time.monotonic() + 200
    while not (run / "ppo" / "metrics.jsonl").exists() or len(steps(run)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_run_without_servers_left_ends_with_its_last_good_state(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path
) -> None:
    server = serve()
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    keys = ["ppo.steps=20", "ppo.checkpoint_every=1", "ppo.log_every=1"]
    rlhf("ppo", "--output", expected, *sets(*keys))
    process = start(rlhf, "ppo", "--output", run, *sets(*keys, where(server)))
    wait_for_step(run, 3, process)
    os.killpg(server.process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert f"ppo.rollout.where: no server is left ({server.address}: " in errors and "Traceback" not in errors
    again = serve()  # at another address
    rlhf("ppo", "--output", run, "--resume", *sets(*keys, where(again)))
    assert_same_run(run, expected)


class Proxy:
    """A server that passes calls on to another, and changes what `change(call, body, answer)` wants changed."""

    def __init__(self, server: Server, change: Callable[[str, bytes, Callable[[bytes], Any]], Any]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                call = self.path.removeprefix(f"{CALLS}/")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, content = change(call, body, self.forward)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_PUT = do_GET

            def forward(self, body: bytes) -> tuple[int, bytes]:
                import http.client

                connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)
                headers = {"Content-Type": "application/json"} if self.command == "POST" else {}
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def edit(answer: tuple[int, bytes], change: Callable[[dict[str, Any]], None]) -> tuple[int, bytes]:
    status, content = answer
    document = json.loads(content)
    change(document)
    return status, json.dumps(document).encode()


class KeepsOldWeights:
    """Confirms all weights, and answers by the first ones."""

    def __init__(self) -> None:
        self.first: tuple[int, bytes] | None = None

    def __call__(self, call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
        if call != "weights":
            return forward(body)
        self.first = self.first or forward(body)
        return self.first


def faulty_draws(change: Callable[[dict[str, Any]], None]) -> Any:
    def proxy(call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
        return edit(forward(body), change) if call == "draw" else forward(body)

    return proxy


def hang(call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
    if call == "draw":
        time.sleep(30)
    return forward(body)


def drop_a_row(answer: dict[str, Any]) -> None:
    answer["rows"].pop()


def shorten(answer: dict[str, Any]) -> None:
    answer["rows"][0]["ids"].pop()


def other_weights(answer: dict[str, Any]) -> None:
    answer["receipt"] = "another"


def beyond_the_vocabulary(answer: dict[str, Any]) -> None:
    answer["rows"][0]["ids"][0] = 10**7


def no_number(answer: dict[str, Any]) -> None:
    answer["rows"][0]["log_probs"] = base64.b64encode(np.full(len(answer["rows"][0]["ids"]), np.nan, "<f4")).decode()


def early_end(answer: dict[str, Any]) -> None:
    row = next(row for row in answer["rows"] if len(row["ids"]) > 1)
    row["ids"][0] = 1


class Restarts:
    """Forgets its weights before it draws, as a process that was started again."""

    def __call__(self, call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
        return forward(body.replace(b'"receipt":"', b'"receipt":"0')) if call == "draw" else forward(body)


def jitter(answer: dict[str, Any]) -> None:
    """Draw as from other probabilities: each log-probability is 0.1 % larger, as in a coarser precision."""
    for row in answer["rows"]:
        numbers = np.frombuffer(base64.b64decode(row["log_probs"]), np.float32) * np.float32(0.999)
        row["log_probs"] = base64.b64encode(numbers.tobytes()).decode()


def another_program(call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
    return 200, b"<html>hello</html>"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (KeepsOldWeights, "it still has the old weights: not a bit of its answer has changed"),
        (lambda: hang, "no answer to 'draw' within 3 seconds"),
        (lambda: faulty_draws(drop_a_row), "it has returned 3 completions of 4 prompts"),
        (lambda: faulty_draws(shorten), " log-probabilities of "),
        (lambda: faulty_draws(other_weights), "it has answered by other weights than it was asked for"),
        (lambda: faulty_draws(beyond_the_vocabulary), "it has returned a token id that is not from 0 to "),
        (lambda: faulty_draws(no_number), "log-probabilities above 0, or that are not numbers"),
        (lambda: faulty_draws(early_end), "a completion that does not end where its end token is"),
        (Restarts, "other weights are loaded than those of this receipt (status 409)"),
        (lambda: another_program, "is not that of a rollout server; is it another program?"),
    ],
    ids=["old-weights", "hang", "row", "token", "weights", "vocabulary", "numbers", "end", "restart", "program"],
)
def test_faulty_server_ends_the_run_with_its_name_and_the_reason(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path, change: Any, reason: str
) -> None:
    proxy, run = Proxy(serve(), change()), copy(begun, tmp_path / "run")
    done = rlhf("ppo", "--output", run, *sets("ppo.rollout.timeout=3", where(proxy)), check=False)
    proxy.close()
    assert done.returncode == 2 and proxy.address in done.stderr and reason in done.stderr
    assert done.stderr.count("\n") == 1, "one line"


@pytest.mark.slow
def test_faulty_server_does_not_harm_a_run_with_another(rlhf: Any, begun: Path, serve: Any, tmp_path: Path) -> None:
    good = serve()
    proxy = Proxy(serve(), KeepsOldWeights())
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    rlhf("ppo", "--output", expected)
    done = rlhf("ppo", "--output", run, *sets(where(proxy, good)))
    proxy.close()
    assert_same_run(run, expected)
    assert [record["rollout_servers"] for record in steps(run)] == [2, 1, 1]
    assert "it still has the old weights" in done.stdout


def test_server_with_another_model_is_refused_before_anything_is_trained(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path, tokenizer: Any
) -> None:
    other = tmp_path / "model"
    llama(len(tokenizer), seed=9, initializer_range=0.3).save_pretrained(other)
    tokenizer.save_pretrained(other)
    small = tmp_path / "small"
    llama(len(tokenizer) + 40).save_pretrained(small)
    tokenizer.save_pretrained(small)
    run = copy(begun, tmp_path / "run")
    done = rlhf("ppo", "--output", run, *sets("lora.rank=4", where(serve(model=other))), check=False)
    assert done.returncode == 2 and "it may have another model" in done.stderr and "nothing was trained" in done.stderr
    done = rlhf("ppo", "--output", run, *sets(where(serve(model=small))), check=False)
    assert (
        done.returncode == 2 and f"its model tiny has {len(tokenizer) + 40} tokens, and the policy has " in done.stderr
    )
    done = rlhf("ppo", "--output", run, *sets("ppo.rollout.where=http://127.0.0.1:9"), check=False)
    assert done.returncode == 2 and "http://127.0.0.1:9: ConnectionRefusedError" in done.stderr
    assert "start it: rlhf serve MODEL --rollouts" in done.stderr
    done = rlhf("ppo", "--output", run, *sets(where(serve(RLHF_SERVE_TOKEN="a"))), check=False)
    assert done.returncode == 2 and "the token is missing or wrong" in done.stderr
    assert not (run / "ppo" / "model").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["ppo.rollout.where=node07:8653"], "expected addresses such as http://node07:8653, got 'node07:8653'"),
        (["ppo.rollout.where=[http://a:1,http://a:1/]"], "http://a:1 is named twice"),
        (["ppo.rollout.where=http://a:1", "ppo.sampling.top_p=0.9"], "servers draw from all tokens"),
        (["ppo.rollout.where=http://a:1", "ppo.sampling.top_k=5"], "servers draw from all tokens"),
        (["ppo.rollout.where=http://a:1", "ppo.generation_exact=true"], "is about rollouts that are drawn here"),
        (["ppo.rollout.where=http://a:1", "ppo.rollout.weights=adapter"], "needs lora.rank"),
        (
            ["ppo.rollout.where=http://a:1", "ppo.rollout.correction_limit=3"],
            "has no effect without ppo.rollout.correction",
        ),
        (["ppo.rollout.timeout=10"], "has no effect without ppo.rollout.where"),
    ],
)
def test_settings_that_do_not_fit_are_refused(rlhf: Any, begun: Path, keys: list[str], message: str) -> None:
    done = rlhf("ppo", "--output", begun, "--dry-run", *sets(*keys), check=False)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_correction_weighs_what_a_server_in_bf16_has_drawn(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path, correction: str
) -> None:
    run = copy(begun, tmp_path / "run")
    keys = [f"ppo.rollout.correction={correction}", "ppo.rollout.correction_limit=1.001"]
    server = serve("--precision", "bf16") if native_bf16() else pytest.skip("no native bf16")
    rlhf("ppo", "--output", run, *sets(where(server), *keys))
    for record in steps(run):
        drawn = [frame for frame in read_steps(run / "ppo" / "steps.bin") if frame.step == record["step"]]
        assert drawn[0].ranks[0].arrays["drawn_log_probs"].dtype == "float32"
        assert 0 < record["correction_share"] < 1 and record["draw_gap"] > 1e-5
        assert record["correction_weight"] == pytest.approx(1, abs=0.02 if correction == "tis" else 1)


TWO_RANKS = """
import accelerators, numpy
from pathlib import Path
from types import SimpleNamespace
from rlhf.engine import distributed
from rlhf.trainers.ppo import rollout_servers
with distributed.start_process_group(accelerators.select("cpu", environ={})):
    is_main = distributed.world().is_main
    servers = object.__new__(rollout_servers.RolloutServers)
    vars(servers).update(
        _drawing=None, _version=(0, 0), _failures=[], _lost=[], _usable=[], _compared={}, _engine=None,
        _servers=[SimpleNamespace(receipt="")], _sends_adapter=True, _report=lambda lines: None,
        _ledgers=[SimpleNamespace(gap=0.01, slope=SimpleNamespace(value=0.9))] if is_main else [],
        _context=SimpleNamespace(directory=SimpleNamespace(path=Path.cwd())),
        _score_probe=lambda: numpy.zeros(1), _send=lambda *given, **options: {0: "receipt"},
    )
    rollout_servers.save_adapter = lambda *given: None
    servers.hand_over((1, 1))
    assert servers.metrics() == {"rollout_servers": 1, "handover_gap": 0.01, "handover_slope": 0.9}, servers.metrics()
"""


def test_all_ranks_know_the_gap_of_a_hand_over(forks: Forks) -> None:
    """Each judges the numbers of its steps; only rank 0 compares the answers of servers."""
    forks.ranks(2, TWO_RANKS)


@pytest.mark.slow
def test_rounding_of_a_server_is_no_alarm_on_any_rank(rlhf: Any, begun: Path, serve: Any, tmp_path: Path) -> None:
    run, server = (
        copy(begun, tmp_path / "run"),
        serve("--precision", "bf16") if native_bf16() else pytest.skip("no bf16"),
    )
    rlhf("ppo", "--output", run, "--ranks", 2, *sets(where(server), "alarms.stop=true"))
    assert all(record["draw_gap"] > 1e-4 for record in steps(run))


def test_token_without_weight_teaches_nothing(rlhf: Any, begun: Path, serve: Any, tmp_path: Path) -> None:
    server = Proxy(serve(), faulty_draws(jitter))
    norms = {}
    for limit in ("1.0000001", "1e6"):
        run = copy(begun, tmp_path / limit)
        keys = ["ppo.steps=1", "ppo.rollout.correction=mis", f"ppo.rollout.correction_limit={limit}"]
        rlhf("ppo", "--output", run, *sets(where(server), *keys))
        (record,) = steps(run)
        norms[limit] = record["grad_norm"]
        assert record["correction_share"] == pytest.approx(1 if limit != "1e6" else 0, abs=0.05)
    server.close()
    assert norms["1.0000001"] < 0.3 * norms["1e6"]


@pytest.mark.slow
def test_records_of_hand_overs_are_documented_and_steps_are_replayed_without_servers(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path
) -> None:
    run = copy(begun, tmp_path / "run")
    server = serve()
    rlhf("ppo", "--output", run, *sets(where(server), "ppo.checkpoint_every=1"))
    server.end()
    added = {key for record in steps(run) for key in record if key.startswith(("handover_", "rollout_"))}
    documented = {key for _, key, text in table(*RECORDS) if "rollout servers" in text}
    assert added == documented == {"handover_gap", "handover_slope", "rollout_servers"}
    checks = rlhf("doctor", run, "--all", recipe=None).stdout
    assert "Servers confirmed each hand-over: mean gap up to " in " ".join(checks.split())
    command = [sys.executable, "-m", "rlhf", "replay", str(run), "--stage", "ppo", "--step", "2"]  # without its servers
    subprocess.run(command, env=user_environment() | {"RLHF_ACCELERATOR": "cpu"}, check=True, timeout=300)


@pytest.mark.slow
def test_moving_average_is_evaluated_with_its_own_completions(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path
) -> None:
    keys = ["ppo.ema=0.5", "ppo.optimizer.learning_rate=0.02"]  # so that both differ
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    rlhf("ppo", "--output", expected, *sets(*keys))
    rlhf("ppo", "--output", run, *sets(where(serve()), *keys))
    after, other = (json.loads((folder / "ppo" / "stage.json").read_text())["after"] for folder in (run, expected))
    assert after["ema_kl"] == pytest.approx(other["ema_kl"], abs=1e-3) != pytest.approx(after["kl"], abs=1e-2)
    assert after["ema_reward"] == pytest.approx(other["ema_reward"], abs=1e-3)
