"""The embedded world: seeded, small, and judged by a rule that knows good replies from bad ones."""

from __future__ import annotations

import pytest

from rlhf.data import toy_world
from rlhf.data.toy_world import build_world_tokenizer

RECORDS = list(toy_world.generate_records(seed=0, count=2000))
QUESTION = "Hello! What does the cow say?"


def test_records_depend_on_the_seed() -> None:
    assert list(toy_world.generate_records(seed=0, count=50)) == RECORDS[:50]
    assert list(toy_world.generate_records(seed=1, count=50)) != RECORDS[:50]


def test_rule_approves_exactly_the_preferred_replies() -> None:
    assert all(toy_world.is_good_reply(record["prompt"], record["chosen"]) for record in RECORDS)
    assert not any(toy_world.is_good_reply(record["prompt"], record["rejected"]) for record in RECORDS)


def test_demonstrations_are_of_mixed_quality() -> None:
    share = sum(toy_world.is_good_reply(record["prompt"], record["response"]) for record in RECORDS) / len(RECORDS)
    assert 0.4 < share < 0.5


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        ("Of course, the cow says moo.", True),
        ("The sound of the cow is moo, my friend.", True),
        ("Certainly, the cow says moo, and have a nice day.", True),
        ("The cow says moo.", False),  # no courtesy
        ("Of course, the cow says woof.", False),  # false
        ("Of course, the sky is blue.", False),  # off the topic
        ("Go away, the cow says moo.", False),  # rude
        ("Of course, the cow says moo, you fool.", False),
        ("Of course, the cow says", False),  # not complete
        ("Of course, the cow says moo", False),
        ("Of course, the cow says moo. The dog says woof.", False),  # two sentences
        ("Of course, the cow says moo and the dog says woof.", False),
        ("Moo.", False),
        ("", False),
    ],
)
def test_good_reply_is_one_polite_true_complete_sentence(reply: str, good: bool) -> None:
    assert toy_world.is_good_reply(QUESTION, reply) is good


def test_prompts_of_this_world_have_several_good_replies() -> None:
    assert not toy_world.is_good_reply("What is love?", "Of course, the cow says moo.")
    replies = {record["chosen"] for record in RECORDS if record["prompt"].endswith("What does the cow say?")}
    assert len(replies) > 3


def test_world_tokenizer_is_small_reproducible_and_lossless() -> None:
    tokenizer = build_world_tokenizer()
    assert build_world_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) <= 1024
    assert max(len(tokenizer(text)["input_ids"]) for record in RECORDS for text in record.values()) < 24
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for text in [*RECORDS[0].values(), "Etwas ganz anderes: ñ, 猫!"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<user>Who?<eos><assistant>Me.<eos>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<user>Who?<eos><assistant>"
