"""Weights arrive one by one, under the model's names, and as the checkpoint has them: what plain transformers loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf.checkpoint.safetensors_writer import SafetensorsWriter
from rlhf.config.schema import ModelConfig
from rlhf.models import lazy_tensors, loading
from rlhf.models.lazy_tensors import Computed, Extended, InMemory, OnDisk, compute_mean_row, read_whole
from rlhf.models.loading import load_causal_lm
from rlhf.models.weight_loading import get_source, place_in_memory, read_parameters
from tests.families.each import EACH
from tests.families.table import build
from tests.helpers import build_tokenizer, llama


def load(path: Path, put: Any = None, attention: str = "eager", **changes: Any) -> Any:
    return load_causal_lm(ModelConfig(path=str(path)), build_tokenizer(), attention=attention, put=put, **changes)


def assert_same_state(found: Any, expected: Any) -> None:
    """Parameters and all buffers, those too that are not saved, bit for bit."""
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    mine = dict(found.named_parameters(remove_duplicate=False)) | dict(found.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    tied = [id(tensor) for tensor in mine.values()]
    assert len(set(tied)) == len({id(tensor) for tensor in theirs.values()})


def streamed(patch: pytest.MonkeyPatch) -> None:
    """From here on a model that transformers would have to load whole fails."""

    def fails(self: Any, model: Any) -> bool:
        assert covers(self, model), "loaded whole"
        return True

    covers = loading.CheckpointTensors.covers
    patch.setattr(loading.CheckpointTensors, "covers", fails)


@pytest.mark.parametrize("family", EACH)
def test_every_family_is_read_as_plain_transformers_reads_it(family, tmp_path, monkeypatch):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    streamed(monkeypatch)
    torch.manual_seed(1)
    model = build(family.configuration(vocab_size=300), MODEL_FOR_CAUSAL_LM_MAPPING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # biases and norms too
    model.save_pretrained(tmp_path)
    found = load(tmp_path)
    assert_same_state(found, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float32 checkpoint whose numbers have more digits than bf16 has."""
    llama(300).save_pretrained(tmp_path / "float32")
    return tmp_path / "float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_once_and_remember_what_they_were(folder, dtype):
    found = load(folder, place_in_memory(dtype))
    stored = load_file(folder / "model.safetensors")
    for name, parameter in found.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, stored[name].to(dtype))
        source = get_source(parameter)
        assert source is not None and torch.equal(read_whole(source, torch.float32), stored[name])
    assert found.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("kind", ["several files", "bin"])
def test_other_kinds_of_files_hold_the_same(folder, tmp_path, kind, monkeypatch):
    streamed(monkeypatch)
    plain, other = load(folder), tmp_path / "other"
    if kind == "bin":
        plain.config.save_pretrained(other)
        torch.save(plain.state_dict(), other / "pytorch_model.bin")
    else:
        plain.save_pretrained(other, max_shard_size="20KB")
        assert len(list(other.glob("*.safetensors"))) > 2
    assert_same_state(load(other), plain)


@pytest.mark.parametrize("alike", [True, False])
def test_tied_weights_that_are_stored_twice_are_one_where_they_are_alike(folder, alike):
    from transformers import AutoModelForCausalLM

    stored = load_file(folder / "model.safetensors")
    head = stored["model.embed_tokens.weight"].clone() if alike else torch.randn(300, 32)
    save_file(stored | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    found = load(folder)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == alike
    assert_same_state(found, AutoModelForCausalLM.from_pretrained(folder))


def test_a_part_of_a_source_is_that_part_of_the_whole(tmp_path):
    tensor = torch.randn(7, 5)
    save_file({"a": torch.zeros(3), "b": tensor}, tmp_path / "one.safetensors")
    header = (tmp_path / "one.safetensors").stat().st_size - 4 * tensor.numel()
    stored = OnDisk(tmp_path / "one.safetensors", header, tensor.shape, torch.float32)
    grown = Extended(stored, 10, compute_mean_row(stored))
    assert torch.equal(
        read_whole(grown, torch.float32), torch.cat([tensor, tensor.double().mean(0).float().expand(3, -1)])
    )
    for source in (stored, InMemory(tensor), Computed(lambda: tensor, tensor.shape, tensor.dtype), grown):
        everything = source.read()
        for start, stop in ((0, 0), (3, 11), (33, len(everything)), (0, 1)):
            assert torch.equal(source.read(start, stop), everything[start:stop])


def test_weights_that_are_loaded_whole_are_not_so_in_silence(folder, monkeypatch, caplog):
    monkeypatch.setattr(loading.CheckpointTensors, "covers", lambda self, model: False)
    load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: its weights cannot be read one by one: each rank loads all, in float32, first"
    ]


def test_what_is_computed_is_computed_once_however_large_it_is(monkeypatch):
    monkeypatch.setattr(lazy_tensors, "CHUNK", 8)
    tensor, calls = torch.randn(10, 7), []
    made = Computed(lambda: calls.append(1) or tensor, tensor.shape, tensor.dtype)
    assert torch.equal(read_whole(made, torch.float32), tensor) and len(calls) == 1
    assert torch.equal(compute_mean_row(made), compute_mean_row(InMemory(tensor))) and len(calls) == 2
    assert lazy_tensors.sources_equal(made, InMemory(tensor)) and not lazy_tensors.sources_equal(
        made, InMemory(tensor + 1)
    )


def test_loading_takes_no_more_memory_than_the_weights_that_are_kept(model_folder, tmp_path):
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
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    kept, taken = map(int, done.stdout.split()[-2:])
    assert 55 < kept < 70 and taken < kept + 90, "pages of the file would be 128 more"


def test_parts_that_are_looked_at_before_the_rest_is_read_keep_their_numbers(folder):
    model, _ = loading._load(str(folder), ModelConfig(path=str(folder)), "sdpa")
    read_parameters(model.model.norm)
    assert not model.model.norm.weight.is_meta and model.lm_head.weight.is_meta
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(model.model.norm.weight, stored["model.norm.weight"])


def test_a_put_may_place_what_it_makes_by_itself(folder):
    seen = []

    def put(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
        seen.append(name)
        if not isinstance(module, nn.Linear) or name == "lm_head.weight":
            return place_in_memory(torch.float32)(name, module, parameter)
        module.weight = place_in_memory(torch.float64)(name, module, parameter)
        return None

    found = load(folder, put)
    assert len(seen) == len(set(seen)) and "lm_head.weight" not in seen, "a tied weight comes once"
    assert found.model.layers[0].mlp.up_proj.weight.dtype == torch.float64


def test_files_are_written_tensor_by_tensor_in_any_order_and_cut_where_they_are_full(tmp_path):
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
        found: dict[str, Any] = {}
        for file in files:
            found |= load_file(file)
            length = int.from_bytes(file.read_bytes()[:8], "little")
            header = json.loads(file.read_bytes()[8 : 8 + length])
            starts = {name: 8 + length + header[name]["data_offsets"][0] for name in tensors.keys() & header}
            assert not any(start % tensors[name].element_size() for name, start in starts.items()), "views are taken"
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
