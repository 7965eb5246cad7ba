"""What is wrong with a model folder or a tokenizer is one line; what can be handled is handled, with a note."""

import shutil
from pathlib import Path

import pytest
import torch

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.loading import check_same_vocabulary, load_causal_lm, load_model_tokenizer, load_scalar_head
from rlhf.models.tokenizers import load_tokenizer
from tests.helpers import build_tokenizer, llama


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def load(folder, tokenizer):
    return load_causal_lm(ModelConfig(path=str(folder)), tokenizer, attention="sdpa")


def test_a_model_is_loaded_in_float32_and_without_a_cache(model_folder, tokenizer):
    model = load(model_folder, tokenizer)
    assert model.dtype == torch.float32 and model.config.use_cache is False


@pytest.mark.parametrize(
    ("missing", "says"), [("config.json", "holds no config.json"), ("model.safetensors", "holds no weights")]
)
def test_an_incomplete_folder_is_named_with_what_it_lacks(folder, tokenizer, missing, says):
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=says) as caught:
        load(folder, tokenizer)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_model_tokenizer(ModelConfig(path=str(folder)))


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_name(tmp_path, tokenizer):
    with pytest.raises(ModelError, match="no such model folder"):
        load(tmp_path / "absent" / "model", tokenizer)


def test_a_hub_name_that_cannot_be_reached_is_one_line(tokenizer):
    with pytest.raises(ModelError, match="nobody/nothing: no folder here, and there is no copy of it") as caught:
        load("nobody/nothing", tokenizer)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_tokenizer_without_a_pad_token_of_its_own_gets_one_and_a_note(tmp_path, pad):
    tokenizer = build_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path)
    found, (note,) = load_tokenizer(str(tmp_path))
    assert found.pad_token_id not in (None, found.eos_token_id)
    assert "pad" in note and repr(found.pad_token) in note


def test_a_tokenizer_with_a_pad_token_is_left_alone(model_folder):
    found, notes = load_tokenizer(str(model_folder))
    assert found.pad_token == "<pad>" and notes == []


def test_a_model_grows_rows_for_tokens_that_its_tokenizer_gained(model_folder):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<new>"])
    assert load(model_folder, tokenizer).get_input_embeddings().num_embeddings == len(tokenizer)


def test_new_rows_are_the_mean_of_the_old_ones_in_both_embeddings(tmp_path):
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
    grown, again = load(tmp_path, tokenizer), load(tmp_path, tokenizer)
    with torch.no_grad():
        before, after = (found(ids).logits.log_softmax(-1) for found in (model.eval(), grown.eval()))
    assert model(ids).logits.mean() < -10, "the model is like GPT-2"
    assert after[..., -2:].exp().max() < 0.01
    assert (after[..., :-2] - before).abs().max() < 0.01
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        new, same, old = (getattr(found, layer)().weight for found in (grown, again, model))
        torch.testing.assert_close(new[-2:], old.mean(0).expand(2, -1))
        assert torch.equal(new, same)


def test_growing_changes_no_random_numbers_that_follow(model_folder):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<new>"])
    torch.manual_seed(5)
    load(model_folder, build_tokenizer())
    expected = torch.rand(1)
    torch.manual_seed(5)
    load(model_folder, tokenizer)
    assert torch.equal(torch.rand(1), expected)


def test_a_composite_models_text_part_knows_the_pad_token(tmp_path, tokenizer):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = Gemma3TextConfig(vocab_size=len(tokenizer), head_dim=8, num_key_value_heads=1, pad_token_id=None, **sizes)
    vision = SiglipVisionConfig(image_size=16, patch_size=8, **sizes)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    scored = load_scalar_head(ModelConfig(), tokenizer, attention="sdpa", path=str(tmp_path), seed=0)
    for found in (load(tmp_path, tokenizer), scored):
        assert found.config.get_text_config().pad_token_id == tokenizer.pad_token_id


def test_a_new_scalar_head_is_drawn_from_the_seed(model_folder, tokenizer):
    def head(seed):
        config = ModelConfig(path=str(model_folder))
        return load_scalar_head(config, tokenizer, attention="sdpa", path=str(model_folder), seed=seed).score.weight

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))


def test_a_language_model_is_not_taken_for_a_reward_model(model_folder, tokenizer):
    with pytest.raises(ModelError, match=r"its weights lack score\.weight"):
        load_scalar_head(ModelConfig(), tokenizer, attention="sdpa", path=str(model_folder))


def test_an_architecture_without_a_token_wise_head_is_refused(tmp_path, tokenizer):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match="decoder-only"):
        load_scalar_head(ModelConfig(), tokenizer, attention="sdpa", path=str(tmp_path))


def test_vocabularies_that_differ_are_told_apart_by_a_token():
    mine, theirs = build_tokenizer(), build_tokenizer()
    check_same_vocabulary(mine, theirs, "reward")
    theirs.add_tokens(["<extra>"])
    with pytest.raises(ModelError, match=r"reward: .* differ in '<extra>'"):
        check_same_vocabulary(mine, theirs, "reward")


def test_a_gguf_file_is_loaded_as_weights_that_can_be_trained_and_saved(tmp_path):
    """A GGUF file of our own making, in float16: loading it needs the `gguf` package only."""
    gguf = pytest.importorskip("gguf")
    model = llama(32, hidden_size=64, intermediate_size=64, num_key_value_heads=4, tie_word_embeddings=False)
    writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy().astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    tokenizer = build_tokenizer()
    found = load_causal_lm(ModelConfig(path=str(tmp_path), gguf_file="tiny.gguf"), tokenizer, attention="sdpa")
    found(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    found.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(found.model.norm.weight, model.model.norm.weight)
