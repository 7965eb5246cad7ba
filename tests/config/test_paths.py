"""Names in the settings: which are paths, and where a path leads."""

import os
from pathlib import Path

import pytest

from rlhf.config import paths


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: an empty one."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


FORMS = ["./a", "../a", ".", "/a", "~/a", "a/b/c", "a/", "a\\b", "my data", "données", "shards/*"]
FILES = ["x.jsonl", "org/x.JSON", "x.csv", "x.parquet", "x.tsv", "x.jsonl.gz"]


@pytest.mark.parametrize("name", [*FORMS, *FILES])
def test_is_path_form_of_a_path_true(name: str) -> None:
    assert paths.is_path(name)
    assert os.path.isabs(paths.make_absolute(name))


@pytest.mark.parametrize(
    "name", ["gpt2", "org/name", "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "org/model-Q4_0.gguf", "world"]
)
def test_is_path_hub_id_false_and_unchanged(name: str) -> None:
    assert not paths.is_path(name)
    assert paths.make_absolute(name) == paths.resolve_relative_to("/some/folder", name) == name


@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_is_path_existing_name_true(here: Path, name: str) -> None:
    (here / name).mkdir(parents=True)
    assert paths.is_path(name)
    assert paths.make_absolute(name) == str(here / name)


def test_is_path_world_false_even_if_a_folder_exists(here: Path) -> None:
    (here / "world").mkdir()
    assert not paths.is_path("world")
    assert paths.make_absolute("world") == paths.resolve_relative_to(str(here), "world") == "world"
    assert paths.make_absolute("./world") == str(here / "world")


def test_make_absolute_shortens_but_keeps_the_target(here: Path, tmp_path: Path) -> None:
    assert paths.make_absolute("./a/../b//c") == str(here / "b" / "c")
    assert paths.make_absolute("../a") == str(tmp_path / "a")
    (tmp_path / "far" / "away").mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "far" / "away")
    assert Path(paths.make_absolute("link/../x")).resolve() == tmp_path / "far" / "x"


def test_resolve_relative_to_joins_paths_to_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.resolve_relative_to("recipes", "data/x.jsonl") == "recipes/data/x.jsonl"
    assert paths.resolve_relative_to("recipes/mine", "../x.jsonl") == "recipes/x.jsonl"
    assert paths.resolve_relative_to("", "./m") == "./m"
    assert paths.resolve_relative_to("recipes", "./m") == "./recipes/m"
    assert paths.resolve_relative_to("recipes", "/m") == "/m"
    assert paths.resolve_relative_to("recipes", "~/m") == "/home/me/m"


def test_resolve_relative_to_joins_hub_id_only_if_it_exists(here: Path) -> None:
    (here / "recipes" / "gpt2").mkdir(parents=True)
    (here / "org").mkdir()
    assert paths.resolve_relative_to("recipes", "gpt2") == "./recipes/gpt2"
    assert paths.resolve_relative_to("recipes", "org") == "org", (
        "the recipe's folder has no such file, only the working directory"
    )


def test_is_local_only_name_in_working_directory_true(here: Path) -> None:
    (here / "recipes" / "gpt2").mkdir(parents=True)
    (here / "org" / "name").mkdir(parents=True)
    (here / "x.jsonl").touch()
    (here / "world").mkdir()
    assert paths.is_local_only("org/name") and paths.is_local_only(paths.resolve_relative_to("recipes", "org/name"))
    for name in ("./org/name", paths.resolve_relative_to("recipes", "gpt2"), "x.jsonl", "world", "absent"):
        assert not paths.is_local_only(name)


def test_missing_path_hint_file_extension_says_no_hub_is_asked(here: Path) -> None:
    assert paths.missing_path_hint("me/data.json") == "; its file extension makes it a path, so no hub is asked"
    for name in ("data.json", "./me/data.json", str(here / "data.json")):
        assert paths.missing_path_hint(name) == ""
    (here / "me").mkdir()
    assert paths.missing_path_hint("me/data.json") == "", "a slip in the name of a file"


def test_missing_path_hint_names_path_in_working_directory(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "x.jsonl").touch()
    assert "; data/x.jsonl is in the working directory" in paths.missing_path_hint("recipes/data/x.jsonl")
    assert "; data/x.jsonl is" in paths.missing_path_hint(str(here / "recipes" / "data" / "x.jsonl"))
    assert paths.missing_path_hint("recipes/data/y.jsonl") == paths.missing_path_hint("y.jsonl") == ""
