"""What DPO takes by the plan: two rows a pair, logits of replies alone, and a reference only where one is held."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.schema import build_config
from rlhf.memory.advice import OutOfMemorySituation, advise, find_changes, list_changes, plan_stages
from rlhf.memory.environment import Environment, MemoryLimits
from rlhf.memory.report import count_operations
from rlhf.memory.stage import build_models

ENVIRONMENT = Environment(1, "bf16")


def configuration(**dpo: Any) -> Any:
    lengths = {"max_prompt_length": 256, "max_completion_length": 256}
    sections = {"sft": {"micro_batch_size": 16, "dropout": 0}, "dpo": {"micro_batch_size": 8} | dpo}
    return build_config({"model": {"path": "opt-125m"}, "data": lengths, **sections})


def advised(config: Any) -> list[str]:
    """Settings that are advised after training ran out of memory."""
    return advise(OutOfMemorySituation(config, "dpo", "training", Environment(unified_memory=True), "bf16"))[0]


def sizes(phase: Any, role: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in phase.items:
        if item.role == role:
            found[item.kind] = found.get(item.kind, 0) + item.size
    return found


def phases(stage: Any, **dpo: Any) -> dict[str, Any]:
    (found,) = plan_stages(configuration(**dpo), [stage], ENVIRONMENT)
    return {phase.name: phase for phase in found.phases}


def test_an_update_of_pairs_is_one_of_twice_as_many_rows_whose_logits_are_of_replies_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf.memory.stage._LARGE", 2**40)  # or else there are none
    pairs, rows = sizes(phases("dpo")["training"], "dpo"), sizes(phases("sft")["training"], "sft")
    assert pairs["activations"] == rows["activations"]
    assert pairs["logits"] == pytest.approx(rows["logits"] / 2, rel=0.05)  # half of a row may be its prompt
    assert all(pairs[kind] == rows[kind] for kind in ("weights", "masters", "moments", "gradients"))


def test_a_reference_is_counted_where_one_is_held_beside_the_policy() -> None:
    alone, beside = phases("dpo"), phases("dpo", reference="beside")
    assert "scoring" not in alone and not sizes(alone["training"], "reference")
    weights = sizes(beside["training"], "reference")["weights"]
    assert weights == pytest.approx(2 * 125e6, rel=0.01)
    assert beside["training"].device - alone["training"].device == pytest.approx(weights, rel=0.2)
    assert sizes(beside["scoring"], "reference")["logits"]


def test_where_a_reference_beside_the_policy_does_not_fit_it_is_found_beforehand() -> None:
    beside = configuration(reference="beside")
    limits = MemoryLimits(phases("dpo")["training"].device + 2**20, None)
    (change,) = find_changes(beside, ["dpo"], ENVIRONMENT, limits)
    assert change.settings == {"dpo.reference": "precomputed"}
    assert advised(beside)[2] == "dpo.reference=precomputed"
    alone = configuration()
    assert not any("reference" in str(one) for one in list_changes(alone, ["dpo"], ENVIRONMENT))
    assert "dpo.reference=precomputed" not in advised(alone)


def test_the_references_pass_is_counted_once_for_all_epochs_or_with_every_step() -> None:
    def passes(**dpo: Any) -> float:
        config = configuration(batch_size=1, micro_batch_size=1, **dpo)
        models = build_models(config, "dpo", ENVIRONMENT)
        everything = models["dpo"].parameters
        return count_operations(config, "dpo", models) / (2 * 512 * 2 * everything)

    assert passes() == pytest.approx(4)  # forward, backward for inputs and for weights, and the reference's
    assert passes(epochs=4) == pytest.approx(3.25)
    assert passes(epochs=4, reference="beside") == pytest.approx(4)
