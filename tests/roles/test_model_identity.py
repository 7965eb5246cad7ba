"""A model is identified by the content of its files; of a hub name also by its commit."""

import hashlib
import json
from contextlib import nullcontext

import pytest

from rlhf.config.schema import load_config
from rlhf.errors import ModelError
from rlhf.roles.model_identity import StartModel, check_model_files, describe_change, identify_model
from rlhf.runs.resume import find_changed_models

GIT_DIGEST = "d670460b4b4aece5915caf5c68d12f560a9fe3e4"
"""The digest of `test content` in the book on git (`git hash-object`)."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of the hub; a function adds a commit of a model, whose weights are links to blobs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)

    def commit(name, weights):
        folder = tmp_path / "models--me--model"
        digest = hashlib.sha256(weights).hexdigest()
        for part in ("refs", "blobs", f"snapshots/{name}"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(name)
        (folder / "blobs" / digest).write_bytes(weights)
        (folder / "snapshots" / name / "model.safetensors").symlink_to(folder / "blobs" / digest)
        (folder / "snapshots" / name / "config.json").write_text(json.dumps({"hidden_size": 64}))
        (folder / "blobs" / GIT_DIGEST).write_bytes(b"test content\n")
        (folder / "snapshots" / name / "merges.txt").symlink_to(folder / "blobs" / GIT_DIGEST)
        return folder / "snapshots" / name

    return commit


def test_hub_name_is_identified_by_content_and_commit(hub):
    folder = hub("a1", b"first")
    identities = [identify_model("me/model"), identify_model(str(folder))]
    assert identities[0] == identities[1] | {"commit": "a1"} and set(identities[1]) == {
        "weights",
        "configuration",
        "tokenizer",
    }
    hub("b2", b"second")
    change = describe_change(identities[0], identify_model("me/model"))
    assert change == "other weights: commit a1 there, b2 now"
    hub("c3", b"first")  # another commit with the same files
    assert describe_change(identities[0], identify_model("me/model")) is None
    assert identify_model("me/absent") == {} and identify_model("/absent/model") == {}


@pytest.mark.parametrize("name", ["model.safetensors", "merges.txt"])
@pytest.mark.parametrize("by_name", [True, False])
def test_changed_file_of_the_hub_cache_is_refused(hub, name, by_name):
    """Within one commit, the digests that name the files are all that tells."""
    folder = hub("a1", b"first")
    model = "me/model" if by_name else folder
    check_model_files(model)
    blob = (folder / name).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(ModelError) as caught:
        check_model_files(model)
    assert str(caught.value) == (
        f"{folder / name}: has other content than on the hub; delete {blob} to have it downloaded again, or name a "
        "copy of the folder if the change is intended"
    )


def test_download_of_missing_files_is_no_change(hub):
    """A run that downloads its model records it before the weights have arrived."""
    folder = hub("a1", b"first")
    whole = identify_model("me/model")
    (folder / "model.safetensors").unlink()
    partial = identify_model("me/model")
    assert "weights" not in partial
    assert describe_change(partial, whole) is None and describe_change(whole, partial) is None


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"weights": "1", "commit": "a"}, None),
        ({"commit": "a"}, None),  # not downloaded yet
        ({"weights": "2", "commit": "b"}, "me/model: differs between machines .other weights: commit a there, b now.;"),
        (None, None),
    ],
)
def test_machines_are_compared_by_content(there, message):
    from rlhf.trainers.pipeline import compare_machines

    here = {"weights": "1", "commit": "a"}
    views = [
        {"model.path": StartModel("me/model", here)},
        {"model.path": StartModel("me/model", there)} if there else {},
    ]
    with pytest.raises(ModelError, match=message) if message else nullcontext():
        compare_machines(views)


@pytest.mark.parametrize(
    ("stage", "key", "path", "now", "changed"),
    [
        ("sft", "model.path", "/old/m", {"weights": "1", "tokenizer": "2"}, None),
        ("sft", "model.path", "/old/m", {"weights": "9", "tokenizer": "2"}, "/old/m (other weights)"),
        ("sft", "model.path", "/old/m", {"weights": "1"}, "/old/m (other tokenizer)"),
        ("sft", "model.path", "/new/m", {"weights": "9", "tokenizer": "8"}, "/new/m (other weights and tokenizer)"),
        ("ppo", "ppo.actor", "/old/m", {"weights": "9", "tokenizer": "2"}, "/old/m (other weights)"),
        ("ppo", "ppo.actor", "/new/m", {"weights": "9", "tokenizer": "2"}, "/new/m (other weights)"),  # both moved
        ("ppo", "ppo.actor", "/old/m", {"weights": "1", "adapter": "3"}, None),  # the other stage reads no adapter
        ("ppo", "ppo.actor", "/else/m", {"weights": "9", "tokenizer": "2"}, None),
    ],
)
def test_models_are_compared_with_every_stage_under_their_path(stage, key, path, now, changed):
    """The record of the same key counts under any path, since the run may have moved."""
    then = {"path": "/old/m", "identity": {"weights": "1", "tokenizer": "2"}}
    recorded = {"config": {"output": "/old/run"}, "stages": {"sft": {"models": {"model.path": then}}}}
    config = load_config(None, ["output=/new/run"])
    differences = find_changed_models(recorded, config, {stage: {key: StartModel(path, now)}})
    assert differences == ([changed] if changed else [])
    assert find_changed_models(recorded, config, {stage: {key: StartModel(path, now)}}, ["reward"]) == []
