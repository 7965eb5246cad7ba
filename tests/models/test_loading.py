"""Models are loaded as plain transformers loads them, weight by weight, and fitted to their tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from rlhf.checkpoint.safetensors_writer import SafetensorsWriter
from rlhf.config.schema import ModelConfig
from rlhf.models import lazy_tensors, loading
from rlhf.models.lazy_tensors import Computed, Extended, InMemory, OnDisk, compute_mean_row, read_whole
from rlhf.models.loading import load_causal_lm, load_scalar_head, place_parameters
from rlhf.models.weight_loading import (
    fill_parameters,
    get_source,
    has_all_weights,
    place_in_memory,
    read_parameters,
    set_source,
)
from tests.families.table import EACH, build
from tests.helpers import build_tokenizer, llama
from tests.models.gguf_file import write_gguf


def load(path: Path, put: Any = None, tokenizer: Any = None) -> Any:
    return load_causal_lm(ModelConfig(path=str(path)), tokenizer or build_tokenizer(), attention="eager", put=put)


def assert_same_state(model: Any, expected: Any) -> None:
    """Compare parameters and all buffers bit for bit, including those that are not saved."""
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    mine = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    tied = [id(tensor) for tensor in mine.values()]
    assert len(set(tied)) == len({id(tensor) for tensor in theirs.values()})


@pytest.fixture
def never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if transformers would have to load a model whole."""

    def check(model: Any, sources: Any) -> bool:
        assert has_all_weights(model, sources), "loaded whole"
        return True

    monkeypatch.setattr(loading, "has_all_weights", check)


@pytest.mark.parametrize("family", EACH)
def test_family_is_loaded_as_by_plain_transformers(family, tmp_path, never_whole):
    torch.manual_seed(1)
    model = build(family.configuration(vocab_size=300), MODEL_FOR_CAUSAL_LM_MAPPING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # biases and norms too
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert_same_state(loaded, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert loaded.config.use_cache is False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float32 checkpoint whose numbers have more digits than bf16 has."""
    llama(300).save_pretrained(tmp_path / "float32")
    return tmp_path / "float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_once_and_keep_their_source(folder, dtype):
    model = load(folder, place_in_memory(dtype))
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, stored[name].to(dtype))
        source = get_source(parameter)
        assert source is not None and torch.equal(read_whole(source, torch.float32), stored[name])
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("kind", ["several files", "bin"])
def test_other_kinds_of_files_have_the_same_weights(folder, tmp_path, kind, never_whole):
    plain, other = load(folder), tmp_path / "other"
    if kind == "bin":
        plain.config.save_pretrained(other)
        torch.save(plain.state_dict(), other / "pytorch_model.bin")
    else:
        plain.save_pretrained(other, max_shard_size="20KB")
        assert len(list(other.glob("*.safetensors"))) > 2
    assert_same_state(load(other), plain)


@pytest.mark.parametrize("alike", [True, False])
def test_tied_weights_stored_twice_are_one_if_equal(folder, alike):
    stored = load_file(folder / "model.safetensors")
    head = stored["model.embed_tokens.weight"].clone() if alike else torch.randn(300, 32)
    save_file(stored | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == alike
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(folder))


def test_sources_are_read_in_parts(tmp_path):
    tensor = torch.randn(7, 5)
    save_file({"a": torch.zeros(3), "b": tensor}, tmp_path / "one.safetensors")
    header = (tmp_path / "one.safetensors").stat().st_size - 4 * tensor.numel()
    stored = OnDisk(tmp_path / "one.safetensors", header, tensor.shape, torch.float32)
    grown = Extended(stored, 10, compute_mean_row(stored))
    assert torch.equal(
        read_whole(grown, torch.float32), torch.cat([tensor, tensor.double().mean(0).float().expand(3, -1)])
    )
    for source in (stored, InMemory(tensor), Computed(lambda: tensor, tensor.shape, tensor.dtype), grown):
        whole = source.read()
        for start, stop in ((0, 0), (3, 11), (33, len(whole)), (0, 1)):
            assert torch.equal(source.read(start, stop), whole[start:stop])


def test_parameters_read_early_keep_their_numbers(folder):
    model, _ = loading._load(str(folder), ModelConfig(path=str(folder)), "sdpa")
    read_parameters(model.model.norm)
    assert not model.model.norm.weight.is_meta and model.lm_head.weight.is_meta
    filled = fill_parameters(model, place_in_memory(torch.float32))
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(filled.model.norm.weight, stored["model.norm.weight"])


def test_whole_loading_is_logged(folder, monkeypatch, caplog):
    monkeypatch.setattr(loading, "has_all_weights", lambda model, sources: False)
    load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: its weights cannot be read one by one: each rank loads all, in float32, first"
    ]


def test_computed_source_is_computed_once_for_a_read(monkeypatch):
    monkeypatch.setattr(lazy_tensors, "CHUNK", 8)
    tensor, calls = torch.randn(10, 7), []
    made = Computed(lambda: calls.append(1) or tensor, tensor.shape, tensor.dtype)
    assert torch.equal(read_whole(made, torch.float32), tensor) and len(calls) == 1
    assert torch.equal(compute_mean_row(made), compute_mean_row(InMemory(tensor))) and len(calls) == 2
    assert lazy_tensors.sources_equal(made, InMemory(tensor)) and not lazy_tensors.sources_equal(
        made, InMemory(tensor + 1)
    )


def test_loading_takes_little_more_memory_than_the_weights(forks, model_folder, tmp_path):
    """Pages of a mapped file would count: 128 MiB of float32 here, of which 64 are kept."""
    llama(300, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2).save_pretrained(tmp_path)
    script = f"""
import re, torch
from rlhf.config.schema import ModelConfig
from rlhf.models.loading import load_causal_lm
from rlhf.models.weight_loading import place_in_memory
from tests.helpers import build_tokenizer
def status(key): return int(re.search(rf"{{key}}:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
def load(path):
    return load_causal_lm(ModelConfig(path=path), tokenizer, attention="sdpa", put=place_in_memory(torch.bfloat16))
tokenizer = build_tokenizer()
load({str(model_folder)!r})  # what has to be imported for it
before = status("VmHWM")
model = load({str(tmp_path)!r})
print(sum(2 * parameter.numel() for parameter in model.parameters()) // 2**20, status("VmHWM") - before)
"""
    done = forks.python("-c", script, timeout=60)
    assert done.returncode == 0, done.stderr
    size, taken = map(int, done.stdout.split()[-2:])
    assert 55 < size < 70 and taken < size + 90, "pages of the file would be 128 more"


def test_writer_takes_tensors_in_any_order_and_splits_files(tmp_path):
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7), "c": torch.tensor([True, False, True])}
    tensors |= {"d": torch.arange(6).view(2, 3), "e": torch.tensor(2.5)}
    for size in (40, 10_000):
        folder = tmp_path / str(size)
        folder.mkdir()
        with SafetensorsWriter(folder, tensors, file_size=size) as writer:
            for name in reversed(tensors):
                writer.write(name, tensors[name])
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == (4 if size == 40 else 1)
        stored: dict[str, Any] = {}
        for file in files:
            stored |= load_file(file)
            length = int.from_bytes(file.read_bytes()[:8], "little")
            header = json.loads(file.read_bytes()[8 : 8 + length])
            starts = {name: 8 + length + header[name]["data_offsets"][0] for name in tensors.keys() & header}
            assert not any(start % tensors[name].element_size() for name, start in starts.items()), "views are taken"
        assert stored.keys() == tensors.keys() and all(torch.equal(stored[name], tensors[name]) for name in stored)


def test_new_rows_are_the_mean_of_the_old_ones(tmp_path):
    """Of a model whose logits are all far below 0, as GPT-2's are: a row near 0 would take all probability."""
    tokenizer = build_tokenizer()
    model = llama(len(tokenizer), tie_word_embeddings=False, seed=3)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
        hidden = model.model(torch.tensor([[5, 6, 7, 8, 9, 10]])).last_hidden_state.mean((0, 1))
        model.lm_head.weight -= 30 * hidden / hidden.square().sum()
    model.save_pretrained(tmp_path)
    tokenizer.add_tokens(["<new>", "<newer>"])
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    grown, again = load(tmp_path, tokenizer=tokenizer), load(tmp_path, tokenizer=tokenizer)
    with torch.no_grad():
        before, after = (network(ids).logits.log_softmax(-1) for network in (model.eval(), grown.eval()))
    assert model(ids).logits.mean() < -10, "the model is like GPT-2"
    assert after[..., -2:].exp().max() < 0.01
    assert (after[..., :-2] - before).abs().max() < 0.01
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        new, same, old = (getattr(network, layer)().weight for network in (grown, again, model))
        torch.testing.assert_close(new[-2:], old.mean(0).expand(2, -1))
        assert torch.equal(new, same)


def test_new_rows_draw_no_random_numbers(model_folder):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<new>"])
    torch.manual_seed(5)
    load(model_folder)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load(model_folder, tokenizer=tokenizer)
    assert torch.equal(torch.rand(1), expected)


def test_text_part_of_composite_model_gets_the_pad_token(tmp_path, tokenizer):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = Gemma3TextConfig(vocab_size=len(tokenizer), head_dim=8, num_key_value_heads=1, pad_token_id=None, **sizes)
    vision = SiglipVisionConfig(image_size=16, patch_size=8, **sizes)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    scored = load_scalar_head(ModelConfig(), tokenizer, attention="sdpa", path=str(tmp_path), seed=0)
    for model in (load(tmp_path, tokenizer=tokenizer), scored):
        assert model.config.get_text_config().pad_token_id == tokenizer.pad_token_id


def test_gguf_weights_can_be_trained_and_saved(tmp_path):
    """A GGUF file of our own making, in float16: loading it needs the `gguf` package only."""
    pytest.importorskip("gguf")
    model = write_gguf(tmp_path / "tiny.gguf", hidden_size=64, intermediate_size=64, num_key_value_heads=4)

    tokenizer = build_tokenizer()
    loaded = load_causal_lm(ModelConfig(path=str(tmp_path), gguf_file="tiny.gguf"), tokenizer, attention="sdpa")
    loaded(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    loaded.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize(("multiple", "rows"), [(1, 301), (7, 301), (8, 304), (64, 320)])
@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_is_rounded_up_without_other_changes(tmp_path, multiple, rows, tied):
    torch.manual_seed(0)
    before = llama(301, tie_word_embeddings=tied)
    before.save_pretrained(tmp_path / "before")
    config = ModelConfig(path=str(tmp_path / "before"), vocabulary_multiple=multiple)
    model = load_causal_lm(config, build_tokenizer(), attention="eager")
    reward = load_scalar_head(config, build_tokenizer(), attention="eager", path=str(tmp_path / "before"), seed=1)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings(), reward.get_input_embeddings()):
        assert layer.weight.shape[0] == rows
        torch.testing.assert_close(layer.weight[301:], layer.weight[:301].mean(0).expand(rows - 301, -1))
    texts = torch.tensor([[5, 6, 7, 300]])
    torch.testing.assert_close(model(texts).logits[..., :301], before(texts).logits)
    model.save_pretrained(tmp_path / "after")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    assert again.config.vocab_size == rows
    torch.testing.assert_close(again(texts).logits, model(texts).logits)


def test_parameters_are_placed_with_their_ties_and_notes():
    """torch refuses `parameter.data = ...` between the CPU and the meta device, as it does for some accelerators."""
    model = llama(20, tie_word_embeddings=True)
    norm = model.model.norm.weight
    norm.requires_grad_(False)
    source = InMemory(norm.detach())
    set_source(norm, source)
    there = model.model.layers[0].mlp.up_proj._parameters["weight"] = torch.nn.Parameter(torch.empty(3, device="meta"))
    place_parameters(model, torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.weight is not norm and get_source(model.model.norm.weight) is source
    assert not model.model.norm.weight.requires_grad and model.lm_head.weight.requires_grad
    assert model.model.layers[0].mlp.up_proj.weight is there
