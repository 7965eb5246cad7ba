"""A model that a stage would fail on is refused in one line; others get the best attention that they support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

import accelerators
from accelerators import KernelImpl, Support
from rlhf.config.schema import ModelConfig
from rlhf.errors import ConfigError, ModelError
from rlhf.models.compatibility import (
    AttentionChoice,
    check_positions,
    check_support,
    choose_attention,
    describe_attention,
    get_max_positions,
    load_generation_config,
)
from rlhf.models.shape import shape_of

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_config(folder: Path, name: str, **values: Any) -> str:
    """Return a folder with the configuration of an architecture, as far as the checks read it."""
    transformers.CONFIG_MAPPING[name](**values).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def test_more_layers_than_any_model_has_are_refused_before_they_are_built(tmp_path: Path) -> None:
    path = save_config(tmp_path, "llama", **SIZES | {"num_hidden_layers": 2001})
    with pytest.raises(ModelError, match=r"configuration cannot be read \(.*2,001 layers, more than 2,000"):
        check_support(path, ModelConfig(path=path), attention="eager")
    with pytest.raises(ConfigError, match=r"describes no model \(.*2,001 layers, more than 2,000"):
        shape_of(path)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("bloom", {"attention": "sdpa"}, "of sdpa attention, BloomForCausalLM has none"),
        ("mamba", {}, "it keeps a recurrent state and no keys and values"),
        ("rwkv", {}, "it keeps a recurrent state"),
        ("recurrent_gemma", {}, "it keeps a recurrent state in a separate cache"),
        ("openai-gpt", {}, "cannot generate with a static cache"),
        ("bert", {}, "no decoder-only language model"),
        ("t5", {}, "no decoder-only language model"),
        ("vit", {}, "no decoder-only language model"),
        ("mllama", {"scalar_head": True}, "no class of the backbone alone that MllamaForCausalLM builds on"),
        ("llama", {"scalar_head": True, "hidden_act": "nothing"}, "LlamaForSequenceClassification cannot be built"),
    ],
)
def test_check_support_refuses_with_the_reason(tmp_path: Path, name: str, options: Any, reason: str) -> None:
    act = {"hidden_act": options.pop("hidden_act")} if "hidden_act" in options else {}
    path = save_config(tmp_path, name, **act)
    with pytest.raises(ModelError) as caught:
        check_support(path, ModelConfig(), **{"attention": "eager"} | options)
    message = str(caught.value)
    assert message.startswith(f"{path}: the architecture {name} is not supported yet: ") and reason in message
    assert "\n" not in message and "http" not in message


@pytest.mark.parametrize("name", ["granite", "cohere", "olmoe"])
def test_check_support_accepts_heads_built_here(tmp_path: Path, name: str) -> None:
    check_support(save_config(tmp_path, name), ModelConfig(), attention="sdpa", scalar_head=True)


@pytest.mark.parametrize("name", ["cohere2", "gpt2"])
def test_check_support_ignores_the_attention_of_the_config(tmp_path: Path, name: str) -> None:
    """The run chooses its own; the configuration's is of the machine where the model was made."""
    path = Path(save_config(tmp_path, name, **SIZES, vocab_size=64)) / "config.json"
    path.write_text(path.read_text().replace("{", '{"attn_implementation": "flash_attention_2",', 1))
    config = check_support(str(tmp_path), ModelConfig(path=str(tmp_path)), attention="eager", scalar_head=True)
    assert config.model_type == name


@pytest.mark.parametrize(
    ("name", "values", "positions"),
    [
        ("gpt2", {"n_positions": 40}, 40),
        ("opt", {"max_position_embeddings": 40}, 40),
        ("gemma3", {"text_config": {"max_position_embeddings": 40}}, 40),
        ("bloom", {}, None),
    ],
)
def test_check_positions_refuses_longer_rows(name: str, values: dict[str, Any], positions: int | None) -> None:
    config = transformers.CONFIG_MAPPING[name](**values)
    assert get_max_positions(config) == positions
    check_positions("m", config, 40)
    if positions:
        with pytest.raises(ModelError, match=r"m: has 40 positions, fewer than data\.max_prompt_length .* = 41"):
            check_positions("m", config, 41)


def test_generation_settings_are_saved_ones_or_the_configs(tmp_path: Path) -> None:
    path = save_config(tmp_path, "llama", eos_token_id=[3, 4])
    assert load_generation_config(path, ModelConfig()).eos_token_id == [3, 4]
    transformers.GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert load_generation_config(path, ModelConfig()).eos_token_id == [5, 6]
    for damaged in ('""', '{"eos_token_id": 5', "[]"):  # never in silence those of the config
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(ModelError, match=r"its generation settings cannot be read .*check generation_config\.json"):
            load_generation_config(path, ModelConfig())


OWN = "cpu_composed"
UNREGISTERED = "takes none that is registered with transformers"
WITHOUT_SDPA = {
    "bloom": "BloomForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
if Version(transformers.__version__) < Version("5.24"):
    WITHOUT_SDPA |= {"gptj": "GPTJForCausalLM", "codegen": "CodeGenForCausalLM"}


def offer(name: str, **changes: Any) -> KernelImpl:
    """Return a plugin's attention that transformers knows as `name`, better than what is portable."""
    options = {"supported": lambda accelerator: Support(True, "fast"), "priority": 99, "plugin": "rlhf-fast 1.0 (fast)"}
    return KernelImpl(
        **{"operation": "attention", "name": name, "factory": lambda accelerator: name} | options | changes
    )


@pytest.fixture
def cpu() -> Any:
    return accelerators.select("cpu", environ={}).create()


@pytest.fixture(scope="session")
def registered() -> str:
    """An attention that is registered with transformers, as a backend does it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("fused", sdpa_attention_forward)
    return "fused"


def choose(cpu: Any, folder: Path, name: str, **values: Any) -> AttentionChoice:
    return choose_attention(cpu, save_config(folder, name, **SIZES, **values), ModelConfig())


@pytest.mark.parametrize("name", sorted({*WITHOUT_SDPA, "gptj", "codegen", "opt", "llama", "falcon"}))
def test_architecture_gets_the_best_it_supports(cpu: Any, tmp_path: Path, name: str) -> None:
    choice = choose(cpu, tmp_path, name, **{"attention_types": [[["global"], 1]]} if name == "gpt_neo" else {})
    if name in WITHOUT_SDPA:
        own = "it does not support s_aux" if name == "gpt_oss" else f"{WITHOUT_SDPA[name]} {UNREGISTERED}"
        assert choice == AttentionChoice("eager", {OWN: own, "sdpa": f"{WITHOUT_SDPA[name]} has none"})
    elif name == "falcon":
        assert choice == AttentionChoice("sdpa", {OWN: f"FalconForCausalLM {UNREGISTERED}"})
    else:
        assert choice == AttentionChoice(OWN, {})


def test_soft_cap_is_never_dropped(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 says that Gemma 2 has sdpa, which would not cap its scores."""
    monkeypatch.setattr(transformers.Gemma2ForCausalLM, "_supports_sdpa", True)
    refusals = {OWN: "it does not support softcap", "sdpa": "torch's scaled_dot_product_attention has no softcap"}
    assert choose(cpu, tmp_path, "gemma2") == AttentionChoice("eager", refusals)


@pytest.mark.parametrize(("name", "takes"), [("llama", True), ("stablelm", True), ("falcon", False), ("bloom", False)])
def test_registered_attention_only_if_the_class_takes_it(
    cpu: Any, registered: str, tmp_path: Path, name: str, takes: bool
) -> None:
    """Others would fail as they are built (Falcon), or use another one silently (BLOOM)."""
    cpu.kernels.add([offer(registered)])
    choice = choose(cpu, tmp_path, name)
    assert (choice.name == registered) == takes
    assert takes or choice.refused[registered].endswith(UNREGISTERED)


def refuse_windows(model: Any) -> str:
    return "no sliding windows" if getattr(model, "sliding_window", None) else ""


def fail(model: Any) -> str:
    raise KeyError("model_type")


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        (refuse_windows, "no sliding windows"),
        (fail, "its check of the model failed (KeyError: 'model_type'); report it to the authors of rlhf-fast 1.0"),
        (lambda model: None, "its check of the model failed (TypeError: a NoneType instead of str)"),
    ],
)
def test_refused_implementation_gives_way_to_the_next(
    cpu: Any, registered: str, tmp_path: Path, refuses: Any, reason: str
) -> None:
    cpu.kernels.add([offer(registered, refuses=refuses)])
    choice = choose(cpu, tmp_path, "mistral", sliding_window=8)
    assert choice.name == OWN and choice.refused[registered].startswith(reason)
    if refuses is refuse_windows:
        assert choose(cpu, tmp_path, "llama") == AttentionChoice(registered, {})


def test_backend_without_eager_refuses_the_model(cpu: Any, tmp_path: Path) -> None:
    cpu.kernel_implementations = lambda: [offer("sdpa")]
    with pytest.raises(ModelError, match=r"supports this model \(sdpa: BloomForCausalLM has none\); choose .* sdpa"):
        choose(cpu, tmp_path, "bloom")


def test_run_reports_and_records_each_models_attention(rlhf: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder, output = tmp_path / "tiny-bloom", tmp_path / "run"
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2, **ends)
    transformers.BloomForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run = rlhf("sft", "--set", f"model.path={folder}", "--set", "sft.max_steps=1", "--output", output)
    refused = {OWN: f"BloomForCausalLM {UNREGISTERED}", "sdpa": "BloomForCausalLM has none"}
    choice = AttentionChoice("eager", refused)
    line = describe_attention({"other": AttentionChoice(OWN, {}), "tiny-bloom": choice})
    assert line is not None and line.startswith(f"attention: eager for tiny-bloom ({OWN}: BloomForCausalLM")
    assert line in run.stdout.splitlines()
    recorded = json.loads((output / "run.json").read_text())["accelerator"]["attention"]
    assert recorded == {str(folder): {"name": "eager", "refused": refused}}
