"""Behaviours of the real bridge that this simulation has (`gaudi_sim.behaviours`), and rlhf's way around each."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from forks import IMPORTS, Forks

ENGINE = Path(__file__).with_name("one_engine.py")
LAZY, EAGER = ({"PT_HPU_LAZY_MODE": mode} for mode in "10")

Done = subprocess.CompletedProcess[str]
Lazy = Callable[..., Done]


@pytest.fixture(scope="module")
def lazy(environment: dict[str, str], site: Path) -> Iterator[Lazy]:
    """Run Python in lazy mode, as rlhf prepares it, in processes that start with the libraries and the device."""
    variables = {"RLHF_GAUDI_SIM": "1", "DS_ACCELERATOR": "hpu", "PT_HPU_WEIGHT_SHARING": "0"} | LAZY
    variables["PATH"] = os.pathsep.join([str(site / "gaudi_sim" / "bin"), os.environ["PATH"]])
    device = ("gaudi_sim.plugin", "habana_frameworks.torch.core", "accelerators.backends.hpu.backend")
    forks = Forks(environment | variables, (*device, *IMPORTS))
    yield lambda *arguments: forks.python(*arguments, timeout=500, cwd=site.parent)
    forks.close()


def result_of(done: Done) -> Any:
    """The JSON in the last line that a process printed."""
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def output(python: Run, code: str, **env: str) -> str:
    done = python("-c", f"import gaudi_sim.plugin\n{code}", strict=False, env=LAZY | env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


# parameters

SET_DATA = """
import torch
import habana_frameworks.torch.core
linear = torch.nn.Linear(2, 2)
weight = linear.weight
linear.to("hpu")
try:
    weight.data = torch.ones(2, 2, device="hpu")
except RuntimeError as error:
    print(error)
there = torch.nn.Parameter(torch.ones(2, device="hpu"))
there.data = torch.zeros(3, device="hpu")
print(linear.weight is weight, there.tolist())
"""


def test_parameters_of_the_host_cannot_become_those_of_the_device(python: Run) -> None:
    refusal, rest = output(python, SET_DATA).splitlines()
    assert "incompatible tensor type" in refusal
    assert rest == "False [0.0, 0.0, 0.0]"
    assert output(python, SET_DATA, RLHF_GAUDI_SIM_WITHOUT="set_data") == "True [0.0, 0.0, 0.0]"


def test_unknown_behaviour_is_one_clear_line(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "explain", "hpu", env={"RLHF_GAUDI_SIM_WITHOUT": "dust"})
    assert done.returncode == 2
    assert "RLHF_GAUDI_SIM_WITHOUT: 'dust' is no behaviour of the simulation; use average, " in done.stderr


@pytest.mark.parametrize("zero_stage", ["0", pytest.param("1", marks=pytest.mark.slow), "2"])
def test_adapters_made_on_the_host_are_trained_on_the_device(lazy: Lazy, zero_stage: str) -> None:
    """An optimizer that was given the host's parameters would change none; and ties survive the move."""
    report = result_of(lazy(str(ENGINE), "adapters", "hpu", zero_stage))
    assert all(report["adapters"]) and not any(report["others"])
    assert len(report["others"]) == 20, "the embeddings are tied"


@pytest.mark.slow
def test_adapters_are_trained_at_zero_3_in_eager_mode(python: Run) -> None:
    report = result_of(python(str(ENGINE), "adapters", "hpu", "3", strict=False, env=EAGER, fresh=True))
    assert all(report["adapters"]) and not any(report["others"])


def test_models_leave_the_device_unless_weight_sharing_keeps_them(python: Run) -> None:
    """The backend's environment turns it off; a user's own value stays."""
    kept, gone = (
        result_of(python(str(ENGINE), "adapters", "hpu", "0", strict=False, env=LAZY | env, fresh=True))["left"]
        for env in ({"PT_HPU_WEIGHT_SHARING": "1"}, {})
    )
    assert kept > 50_000 and gone < 1000


# checkpoints

SAVE = """
import sys, torch
import habana_frameworks.torch.core
torch.save({"x": torch.ones(2)}, sys.argv[1])
print(torch.load(sys.argv[1], weights_only=True)["x"].tolist())
"""
LOAD = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['x'].tolist())"


def test_files_of_lazy_mode_are_read_by_its_own_unpickler_alone(python: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    code = f"import gaudi_sim.plugin\n{SAVE}"
    assert python("-c", code, path, env=LAZY).stdout == "[1.0, 1.0]\n"
    refused = python("-c", LOAD, path, simulated=False)
    assert "Weights only load failed" in refused.stderr
    assert python("-c", code, path, env=LAZY | {"RLHF_GAUDI_SIM_WITHOUT": "save"}).returncode == 0
    assert python("-c", LOAD, path, simulated=False).stdout == "[1.0, 1.0]\n"


@pytest.mark.parametrize("zero_stage", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_checkpoint_of_lazy_mode_is_resumed_on_the_cpu_and_in_eager_mode(
    lazy: Lazy, python: Run, tmp_path: Path, zero_stage: str
) -> None:
    saved = result_of(lazy(str(ENGINE), "save", "hpu", zero_stage, str(tmp_path)))
    resume = (str(ENGINE), "resume")
    on_cpu = python(*resume, "cpu", zero_stage, str(tmp_path), simulated=False, strict=False, loaded=True)
    in_eager = python(*resume, "hpu", zero_stage, str(tmp_path), strict=False, env=EAGER, fresh=True)
    for resumed in map(result_of, (on_cpu, in_eager)):
        assert resumed["weights"] == pytest.approx(saved["weights"], rel=1e-6)
        assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-4)


# attention

PADDED = f"""
import json, sys
sys.path.append({str(Path(__file__).parents[3])!r})
import accelerators
selection = accelerators.select(sys.argv[1])
import torch
from tests.helpers import llama
from rlhf.models.forward import completion_log_probs
from rlhf.models.loading import place_model
accelerator = selection.create()
accelerator.bind(0)
model = llama(60)
model.set_attn_implementation(accelerator.kernels.get("attention"))
model = place_model(model, accelerator.device(), torch.float32)
torch.manual_seed(0)
ids = torch.randint(2, 60, (3, 12))
mask = torch.ones_like(ids)
mask[0, :5] = mask[1, :1] = 0
ids, mask = accelerator.to_device((ids * mask, mask))
log_probs = completion_log_probs(model, ids, mask, 6).log_probs
log_probs.sum().backward()
gradients = [parameter.grad.cpu().norm().item() for parameter in model.parameters()]
print(json.dumps([log_probs.detach().cpu().flatten().tolist(), gradients]))
"""
UNOPENED = """
from accelerators import portable
portable.open_empty_rows = lambda mask: mask
"""


def test_left_padding_trains_although_the_kernel_is_nan_for_rows_that_see_nothing(lazy: Lazy, python: Run) -> None:
    """Forward and backward are those of the CPU; without `open_empty_rows` they are NaN, as on the card."""
    expected = result_of(python("-c", PADDED, "cpu", simulated=False, strict=False, loaded=True))
    for actual, numbers in zip(result_of(lazy("-c", PADDED, "hpu")), expected):
        assert actual == pytest.approx(numbers, rel=1e-3, abs=1e-5)
    assert "NaN" in lazy("-c", UNOPENED + PADDED, "hpu").stdout


SINKS = """
import torch
import habana_frameworks.torch.core
from habana_frameworks.torch.hpex.kernels import FusedSDPA
torch.manual_seed(0)
query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
sink = torch.randn(4)
defaults = "None", None, None, "None", False, False, (-1, -1)
there = [tensor.to("hpu") for tensor in (query, key, value)]
actual = FusedSDPA.apply(*there, None, 0.0, True, 0.3, *defaults, sink.to("hpu"))
scores = query @ key.repeat_interleave(2, 1).mT * 0.3
scores = scores.masked_fill(torch.ones(5, 5).tril() == 0, float("-inf"))
weights = torch.cat([scores, sink.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
torch.testing.assert_close(actual.cpu(), weights @ value.repeat_interleave(2, 1))
try:
    FusedSDPA.apply(*there, torch.zeros(2, 1, 5, 5, device="hpu"), 0.0, True)
except RuntimeError as error:
    print(error)
"""


def test_attention_has_sinks_and_refuses_a_mask_of_causal_rows(python: Run) -> None:
    assert "attn_mask must be None if is_causal is set" in output(python, SINKS)


# operators and memory

DECODE = f"""
import logging, sys, warnings
sys.path.append({str(Path(__file__).parents[3])!r})
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
warnings.simplefilter("always")
import accelerators
accelerator = accelerators.select("hpu").create()
accelerator.bind(0)
import torch
from habana_frameworks.torch.hpu.graphs import HPUGraph
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder
from tests.helpers import llama
replays = []
replay = HPUGraph.replay
HPUGraph.replay = lambda self: replays.append(1) or replay(self)
decoder = Decoder(accelerator, eos_ids=[-1], pad_id=0, max_new_tokens=12)
ids = torch.full((2, 4), 5, device="hpu")
model = llama(60).to("hpu").eval()
decoder.generate(model, ids, torch.ones_like(ids), SamplingConfig(top_k=5, top_p=0.9))
print("replays", len(replays) > 5)
"""


def test_recorded_decoding_uses_no_operator_that_recordings_dislike(lazy: Lazy) -> None:
    """index_select warns in a recording; gather of int64 ends it. Torch's own embedding ends in an index_select."""
    done = lazy("-c", DECODE)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["replays True"]), done.stderr[-2000:]
    warned = [line for line in done.stderr.splitlines() if "UserWarning: operations used in HPU graphs" in line]
    assert all("torch/nn/functional.py" in line for line in warned), warned


def test_decoding_is_unrecorded_and_says_so_if_an_operator_falls_back_to_the_cpu(python: Run) -> None:
    done = python("-c", DECODE, strict=False, env=LAZY | {"RLHF_GAUDI_SIM_NO_INT64": "isin"}, fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said, replays = done.stdout.splitlines()
    assert said.startswith("generation is slower than possible") and replays == "replays False"


OPERATORS = """
import warnings
import torch
import habana_frameworks.torch.core as core
ids = torch.tensor([-3, 4], device="hpu")
core.mark_step()
assert torch.relu(ids).tolist() == [0, 4]  # on the host
places = torch.tensor([1], device="hpu")
try:
    with core.hpu.graph(core.hpu.HPUGraph()):
        torch.relu(ids)
except RuntimeError as error:
    print(error)
with warnings.catch_warnings(record=True) as caught, core.hpu.graph(core.hpu.HPUGraph()):
    warnings.simplefilter("always")
    torch.ones(2, device="hpu").index_select(0, places)
print(caught[0].message)
"""


def test_recordings_refuse_what_runs_on_the_host_and_warn_of_index_select(python: Run) -> None:
    refusal, warning = output(python, OPERATORS).splitlines()[:2]
    assert "aten::relu of int64: cpu fallback is not supported during hpu graph capturing" in refusal
    assert "operations used in HPU graphs might result in accuracy issues : index_select" in warning


MEMORY = """
import accelerators
accelerator = accelerators.select("hpu").create()
accelerator.bind(0)
import torch
assert accelerator.memory().total == 1 << 20
try:
    torch.ones(1 << 20, device="hpu")
except RuntimeError as error:
    print(accelerator.is_out_of_memory(error), error)
"""


def test_memory_limit_is_reported_in_the_bridges_words(python: Run) -> None:
    said = output(python, MEMORY, RLHF_GAUDI_SIM_MEMORY=str(2**-10))
    assert said.startswith("True [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::4194304 (4)MB")


# cards

BIND = """
import sys, time
import accelerators
accelerator = accelerators.select("hpu").create()
accelerator.bind(int(sys.argv[1]))
import os, torch
print(torch.ones(2, device="hpu").sum().item(), os.environ.get("HLS_MODULE_ID"), flush=True)
"""


def bind(python: Run, rank: int = 0, code: str = BIND, **env: str) -> tuple[str, str]:
    """The output of a process that binds the card of a rank, and the last line of its errors."""
    done = python("-c", f"import gaudi_sim.plugin\n{code}", str(rank), strict=False, env=env)
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


def test_one_process_at_a_time_opens_a_card(python: Run, tmp_path: Path) -> None:
    node = {"RLHF_GAUDI_SIM_NODE": str(tmp_path), "RLHF_GAUDI_SIM_CARDS": "2"}
    second = BIND + (
        "import subprocess\n"
        "code = 'import gaudi_sim.plugin' + chr(10) + sys.argv[2]\n"
        "done = subprocess.run([sys.executable, '-c', code, '0'], capture_output=True, text=True)\n"
        "print(done.stderr.strip().splitlines()[-1])\n"
    )
    code = f"import gaudi_sim.plugin\n{second}"
    for cards, refusal in (("1", True), ("2", False)):
        done = python("-c", code, "0", BIND, strict=False, env=node | {"RLHF_GAUDI_SIM_CARDS": cards})
        last = done.stdout.strip().splitlines()[-1]
        assert ("Device acquire failed.); hl-smi shows who uses it, and one process has a card" in last) == refusal
    assert bind(python, **node)[0] == "2.0 None", "the cards are free again"


def test_rank_opens_a_card_that_the_container_has(python: Run, tmp_path: Path) -> None:
    """hl-smi lists four cards, and the files of two are there: the bridge alone would open module 0 for rank 0."""
    node = {"RLHF_GAUDI_SIM_NODE": str(tmp_path), "RLHF_GAUDI_SIM_CARDS": "4", "RLHF_GAUDI_SIM_CLOSED": "0,2"}
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert bind(python, **node, **ranks)[0] == "2.0 1"
    assert bind(python, 1, **node, **ranks | {"LOCAL_RANK": "1"})[0] == "2.0 3"
    named = {"HABANA_VISIBLE_MODULES": "3,1"}
    assert bind(python, **node, **ranks, **named)[0] == "2.0 3", "the order of the user"
    assert "no device for local rank 2, this machine shows 2" in bind(python, 2, **node)[1]
    alone = "from accelerators.backends.hpu.backend import HPU\nHPU._choose_module = lambda self, cards, rank: None\n"
    assert "Device acquire failed" in bind(python, code=alone + BIND, **node, **ranks)[1]
    without = {"RLHF_GAUDI_SIM_WITHOUT": "modules"}
    assert bind(python, code=alone + BIND, **node, **ranks, **without)[0].startswith("2.0")


@pytest.mark.parametrize(("driver", "refusal"), [("1.23.0-695", True), ("1.24.0-12", False)])
def test_software_of_another_release_than_the_driver_is_named(python: Run, driver: str, refusal: bool) -> None:
    said, last = bind(python, RLHF_GAUDI_SIM_DRIVER=driver)
    assert said == ("" if refusal else "2.0 None")
    if refusal:
        assert "synStatus 26" in last
        assert last.endswith("this container is of release 1.24, and the driver of 1.23: use the container of 1.23")


def test_run_sets_a_folder_for_logs_where_the_bridge_would_abort(python: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"HABANA_LOGS": str(tmp_path / "file" / "logs")}
    assert python("-c", "import gaudi_sim.plugin, habana_frameworks.torch", strict=False, env=env).returncode in (
        -6,
        134,
    )
    without = env | {"RLHF_GAUDI_SIM_WITHOUT": "logs"}
    assert python("-c", "import gaudi_sim.plugin, habana_frameworks.torch", strict=False, env=without).returncode == 0
    export = "import os, accelerators\naccelerators.select('hpu').export(os.environ, {})\n"
    assert bind(python, code=export + BIND, **env)[0] == "2.0 None"


# DeepSpeed


def test_zero_3_is_refused_in_lazy_mode_before_anything_is_loaded(python: Run, tmp_path: Path) -> None:
    command = ["-m", "rlhf", "sft", "--accelerator", "hpu", "--set", "engine.zero_stage=3"]
    done = python(*command, "--output", str(tmp_path / "run"), "--dry-run", strict=False, env=LAZY, fresh=True)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith(
            "engine.zero_stage: the sft model would use ZeRO 3, but Gaudi's lazy mode crashes at ZeRO-3; unset "
            "PT_HPU_LAZY_MODE for eager mode, or use ZeRO-2"
        )
    )
