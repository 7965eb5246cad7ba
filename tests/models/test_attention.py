"""A model runs with the best attention of the backend's that its architecture takes, and the others say why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import accelerators
from accelerators import KernelImpl, Support
from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.compatibility import AttentionChoice, choose_attention, describe_attention

OWN = "cpu_composed"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def offer(name: str, **changes: Any) -> KernelImpl:
    """A plugin's attention that transformers knows as `name`, better than what is portable."""
    options = {"supported": lambda accelerator: Support(True, "fast"), "priority": 99, "plugin": "rlhf-fast 1.0 (fast)"}
    return KernelImpl(
        **{"operation": "attention", "name": name, "factory": lambda accelerator: name} | options | changes
    )


@pytest.fixture
def cpu() -> Any:
    return accelerators.select("cpu", environ={}).create()


@pytest.fixture(scope="session")
def registered() -> str:
    """An attention of one's own, as a backend registers it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("fused", sdpa_attention_forward)
    return "fused"


def saved(folder: Path, name: str, **values: Any) -> str:
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[name](**SIZES, **values).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def chosen(cpu: Any, path: str) -> AttentionChoice:
    return choose_attention(cpu, path, ModelConfig())


NONE = {
    "bloom": "BloomForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


TAKES_NONE = "takes none that is registered with transformers"


@pytest.mark.parametrize("name", [*NONE, "opt", "llama", "falcon"])
def test_an_architecture_gets_the_best_that_it_has_and_eager_last(cpu: Any, tmp_path: Path, name: str) -> None:
    layers = {"attention_types": [[["global"], 1]]} if name == "gpt_neo" else {}
    found = chosen(cpu, saved(tmp_path, name, **layers))
    if name in NONE:
        own = "it does not support s_aux" if name == "gpt_oss" else f"{NONE[name]} {TAKES_NONE}"
        assert found == AttentionChoice("eager", {OWN: own, "sdpa": f"{NONE[name]} has none"})
    elif name == "falcon":
        assert found == AttentionChoice("sdpa", {OWN: f"FalconForCausalLM {TAKES_NONE}"})
    else:
        assert found == AttentionChoice(OWN, {})


def test_a_soft_cap_is_never_dropped(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 says that Gemma 2 has sdpa, which would not cap its scores."""
    monkeypatch.setattr(transformers.Gemma2ForCausalLM, "_supports_sdpa", True)
    refusals = {OWN: "it does not support softcap", "sdpa": "torch's scaled_dot_product_attention has no softcap"}
    assert chosen(cpu, saved(tmp_path, "gemma2")) == AttentionChoice("eager", refusals)


@pytest.mark.parametrize(
    ("name", "takes"), [("llama", True), ("stablelm", True), ("falcon", False), ("bloom", False), ("codegen", False)]
)
def test_a_registered_attention_is_for_architectures_that_ask_for_it_by_name(
    cpu: Any, registered: str, tmp_path: Path, name: str, takes: bool
) -> None:
    """Others would fail as they are built (Falcon), or take their own and say nothing (BLOOM)."""
    cpu.kernels.add([offer(registered)])
    found = chosen(cpu, saved(tmp_path, name))
    assert (found.name == registered) == takes
    assert takes or found.refused[registered].endswith("ForCausalLM takes none that is registered with transformers")


def no_windows(model: Any) -> str:
    return "no sliding windows" if getattr(model, "sliding_window", None) else ""


def raises(model: Any) -> str:
    raise KeyError("model_type")


@pytest.mark.parametrize(
    ("refuses", "why"),
    [
        (no_windows, "no sliding windows"),
        (raises, "its check of the model failed (KeyError: 'model_type'), which is for the authors of rlhf-fast 1.0"),
        (lambda model: None, "its check of the model failed (TypeError: a NoneType instead of str)"),
        (lambda: "", "its check of the model failed (TypeError: "),
    ],
)
def test_what_an_implementation_refuses_gets_the_next_one(
    cpu: Any, registered: str, tmp_path: Path, refuses: Any, why: str
) -> None:
    cpu.kernels.add([offer(registered, refuses=refuses)])
    found = chosen(cpu, saved(tmp_path, "mistral", sliding_window=8))
    assert found.name == OWN
    assert found.refused[registered].startswith(why)
    if refuses is no_windows:
        assert chosen(cpu, saved(tmp_path, "llama")) == AttentionChoice(registered, {})


def test_a_backend_without_eager_refuses_what_it_cannot_serve(cpu: Any, tmp_path: Path) -> None:
    cpu.kernel_implementations = lambda: [offer("sdpa")]
    path = saved(tmp_path, "bloom")
    with pytest.raises(ModelError) as caught:
        chosen(cpu, path)
    reasons = "no attention implementation of cpu supports this model (sdpa: BloomForCausalLM has none)"
    assert str(caught.value) == f"{path}: {reasons}; choose a model that supports sdpa"


def test_one_line_says_which_models_did_not_get_the_first_choice() -> None:
    best, other = AttentionChoice("sdpa", {}), AttentionChoice("eager", {"fused": "no alibi", "sdpa": "has none"})
    assert describe_attention({"a": best, "b": best}) is None
    assert describe_attention({"a": best, "b": other}) == "attention: eager for b (fused: no alibi; sdpa: has none)"
    assert describe_attention({"a": other, "b": other}) == (
        "attention: eager for a, eager for b (fused: no alibi; sdpa: has none)"
    )


def test_a_run_says_and_records_what_each_model_got(rlhf: Any, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    folder, output = tmp_path / "tiny-bloom", tmp_path / "run"
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    BloomForCausalLM(
        BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2, **ends)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = ("--set", f"model.path={folder}", "--set", "sft.max_steps=1", "--output", output)
    done = rlhf("sft", *settings)
    refused = {OWN: f"BloomForCausalLM {TAKES_NONE}", "sdpa": "BloomForCausalLM has none"}
    reasons = "; ".join(f"{better}: {why}" for better, why in refused.items())
    assert f"attention: eager for tiny-bloom ({reasons})" in done.stdout.splitlines()
    recorded = json.loads((output / "run.json").read_text())["accelerator"]["attention"]
    assert recorded == {str(folder): {"name": "eager", "refused": refused}}
