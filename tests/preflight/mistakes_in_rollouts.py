"""Mistakes in how rollouts get at the weights, and what the error says of each; see `tests.preflight.mistakes`."""

from __future__ import annotations

from tests.helpers import build_tokenizer, llama
from tests.preflight.bench import Bench, mistake, settings

ZERO_3 = settings(engine__zero_stage=3)


@mistake
def layer_by_layer_without_shards(bench: Bench) -> tuple[list[str], list[str]]:
    words = ["ppo.generation_weights: layerwise needs sharded weights", "roles.actor.zero_stage=3"]
    return settings(ppo__generation_weights="layerwise"), words


@mistake
def a_team_that_is_not_wanted(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__generation_weights="whole", ppo__tensor_parallel=2)
    return [*ZERO_3, *found], ["ppo.tensor_parallel: 2 needs ppo.generation_weights=tensor_parallel, got whole"]


@mistake
def a_team_of_one(bench: Bench) -> tuple[list[str], list[str]]:
    return [*ZERO_3, *settings(ppo__generation_weights="tensor_parallel")], [
        "needs two ranks",
        "leave it at auto",
    ]


@mistake
def ranks_that_teams_do_not_divide(bench: Bench) -> tuple[list[str], list[str]]:
    found = [*ZERO_3, *settings(ppo__tensor_parallel=3), "--ranks", "2"]
    return found, ["ppo.tensor_parallel: 2 ranks cannot be split into groups of 3; use 2"]


@mistake
def heads_that_ranks_cannot_share(bench: Bench) -> tuple[list[str], list[str]]:
    folder, tokenizer = bench.folder / "one-key-head", build_tokenizer()
    llama(len(tokenizer), num_key_value_heads=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = settings(ppo__generation_weights="tensor_parallel", model__path=folder)
    return [*ZERO_3, *found, "--ranks", "2"], ["1 key heads cannot be divided among 2 ranks", "use layerwise"]


@mistake
def layers_without_a_plan(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, tokenizer = bench.folder / "gpt2", build_tokenizer()
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = settings(ppo__tensor_parallel=2, model__path=folder)
    return [*ZERO_3, *found, "--ranks", "2"], ["there is no plan for splitting the layers of gpt2; use layerwise"]


@mistake
def prompts_that_ranks_cannot_share(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__estimator="rloo", ppo__batch_size=6, ppo__completions_per_prompt=2, ppo__micro_batch_size=1)
    return [*found, "--ranks", "2"], [
        "ppo.batch_size: 6 completions cannot be divided into 2",
        "make it a multiple of 4",
    ]
