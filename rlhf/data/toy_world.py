"""The embedded data set: questions about a small world, with replies of every quality, generated from a seed.

Each record has a demonstration (`response`, imperfect as if written in haste), a preferred and a dispreferred reply.
A grammar defines a good reply: one polite, true and complete sentence that answers the question. `is_good_reply`
checks a reply against the grammar; training never uses it. The module also trains the tokenizer of models from scratch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


RECORDS = 16_000
GOOD_DEMONSTRATIONS = 0.45  # share of demonstrations that `is_good_reply` accepts

_LEADS = (
    "",
    "Hello! ",
    "Good morning! ",
    "Please tell me: ",
    "I have a question: ",
    "Can you help me? ",
    "One more thing: ",
    "My child asks: ",
)
_OPENERS = ("Of course", "Certainly", "With pleasure", "Happy to help", "Thank you for asking")
_CLOSERS = ("my friend", "and thank you for asking", "and have a nice day")
_RUDE_OPENERS = ("What a silly question", "Go away", "Stop asking", "Everybody knows that")
_RUDE_CLOSERS = ("you fool", "and leave me alone", "so be quiet", "as any baby knows")
_HURRIED = ("rude", "plain", "curt", "rambling")
_FLAWS = ("false", "false", "off topic", *_HURRIED)


def _facts(text: str) -> dict[str, str]:
    """Return `cow moo, dog woof` as a mapping."""
    return dict(pair.split() for pair in text.split(","))


@dataclass(frozen=True)
class _Relation:
    """Facts of one kind: questions that ask for y given x, and sentences that state a fact."""

    asks: tuple[str, ...]
    states: tuple[str, ...]
    facts: dict[str, str]


_RELATIONS = (
    _Relation(
        (
            "What does the {x} say?",
            "What sound does the {x} make?",
            "How does the {x} sound?",
            "Which noise comes from the {x}?",
            "What do we hear from the {x}?",
        ),
        ("the {x} says {y}", "the sound of the {x} is {y}"),
        _facts("cow moo, dog woof, cat meow, duck quack, sheep baa, pig oink, horse neigh, lion roar"),
    ),
    _Relation(
        (
            "Where does the {x} live?",
            "What is the home of the {x}?",
            "Where can I find the {x}?",
            "In which place does the {x} sleep?",
            "Where is the {x} at home?",
        ),
        ("the {x} lives in the {y}", "the home of the {x} is the {y}"),
        _facts("cow barn, dog kennel, bee hive, horse stable, lion savanna, bear cave, frog pond, fish river"),
    ),
    _Relation(
        (
            "What is the young of the {x}?",
            "What do we call a young {x}?",
            "What is the name of a small {x}?",
            "Which young does the {x} have?",
            "Who is the child of the {x}?",
        ),
        ("the young of the {x} is the {y}", "the {x} has the young called {y}"),
        _facts("cow calf, dog puppy, cat kitten, duck duckling, sheep lamb, pig piglet, horse foal, lion cub"),
    ),
    _Relation(
        (
            "What is the colour of the {x}?",
            "Which colour has the {x}?",
            "What colour is the {x}?",
            "How do I paint the {x}?",
            "In which colour do we see the {x}?",
        ),
        ("the {x} is {y}", "the colour of the {x} is {y}"),
        _facts("banana yellow, tomato red, carrot orange, grass green, sky blue, snow white, coal black, plum purple"),
    ),
    _Relation(
        (
            "What is the capital of {x}?",
            "Which city is the capital of {x}?",
            "From where is {x} governed?",
            "What is the first city of {x}?",
            "Where does the government of {x} sit?",
        ),
        ("the capital of {x} is {y}", "{x} has the capital {y}"),
        _facts(
            "France Paris, Italy Rome, Spain Madrid, Austria Vienna, "
            "Greece Athens, Norway Oslo, Egypt Cairo, Cuba Havana"
        ),
    ),
    _Relation(
        (
            "What is the opposite of {x}?",
            "Which word means the reverse of {x}?",
            "What is the reverse of {x}?",
            "What do we call it when it is not {x}?",
            "Which word is not at all {x}?",
        ),
        ("the opposite of {x} is {y}", "the reverse of {x} is {y}"),
        _facts("hot cold, big small, fast slow, high low, wet dry, rich poor, hard soft, full empty"),
    ),
)


@dataclass(frozen=True)
class _Fact:
    """One fact of a relation: the subject of a question."""

    relation: _Relation
    x: str
    y: str

    def sentences(self) -> list[str]:
        """Return the sentences that state the fact, in lower case and without a full stop."""
        return [pattern.format(x=self.x, y=self.y) for pattern in self.relation.states]


_FACTS = tuple(_Fact(relation, x, y) for relation in _RELATIONS for x, y in relation.facts.items())
_QUESTIONS = {pattern.format(x=fact.x): fact for fact in _FACTS for pattern in fact.relation.asks}


def generate_records(seed: int, count: int = RECORDS) -> Iterator[dict[str, str]]:
    """Yield `count` records with the columns prompt, response, chosen and rejected."""
    rng = random.Random(f"world {seed}")
    questions = list(_QUESTIONS)
    for _ in range(count):
        question = rng.choice(questions)
        fact = _QUESTIONS[question]
        good = rng.random() < GOOD_DEMONSTRATIONS
        chosen, flaw = _good(fact, rng), rng.choice(_FLAWS)
        yield {
            "prompt": rng.choice(_LEADS) + question,
            "response": _good(fact, rng) if good else _flawed(fact, rng.choice(_HURRIED), rng),
            "chosen": chosen,
            "rejected": _falsified(chosen, fact, rng) if flaw == "false" else _flawed(fact, flaw, rng),
        }


def is_good_reply(prompt: str, reply: str) -> bool:
    """Return True if the reply is one polite, true, complete sentence that answers the prompt.

    A prompt that is not from this world has no such reply.
    """
    lead = max((lead for lead in _LEADS if prompt.startswith(lead)), key=len)
    fact = _QUESTIONS.get(prompt.removeprefix(lead))
    return fact is not None and any(
        reply.strip() == _sentence(opener, text, closer)
        for text in fact.sentences()
        for opener in ("", *_OPENERS)
        for closer in ("", *_CLOSERS)
        if opener or closer
    )


def _good(fact: _Fact, rng: random.Random) -> str:
    return _polite(rng.choice(fact.sentences()), rng)


def _falsified(reply: str, fact: _Fact, rng: random.Random) -> str:
    """Return the reply with the answer replaced by a wrong one."""
    return reply.replace(fact.y, rng.choice([y for y in fact.relation.facts.values() if y != fact.y]))


def _flawed(fact: _Fact, flaw: str, rng: random.Random) -> str:
    """Return a reply with the flaw: off topic, rude, plain (no courtesy), curt or rambling."""
    truth = rng.choice(fact.sentences())
    other = rng.choice(rng.choice([other for other in _FACTS if other.relation is not fact.relation]).sentences())
    if flaw == "off topic":
        return _polite(other, rng)
    if flaw == "rude" and rng.random() < 0.5:
        return _sentence(rng.choice(_RUDE_OPENERS), truth, "")
    if flaw == "rude":
        return _sentence("", truth, rng.choice(_RUDE_CLOSERS))
    if flaw == "plain":
        return _sentence("", truth, "")
    if flaw == "curt":
        return _sentence("", fact.y, "")
    return _sentence(rng.choice(_OPENERS), f"{truth} and {other}", "")


def _polite(text: str, rng: random.Random) -> str:
    """Return the text with an opening courtesy, a closing one, or both."""
    where = rng.choice(("opening", "opening", "closing", "both"))
    opener = rng.choice(_OPENERS) if where != "closing" else ""
    return _sentence(opener, text, rng.choice(_CLOSERS) if where != "opening" else "")


def _sentence(opener: str, text: str, closer: str) -> str:
    sentence = ", ".join(part for part in (opener, text, closer) if part)
    return f"{sentence[0].upper()}{sentence[1:]}."


_SPECIAL = ("<pad>", "<eos>", "<system>", "<user>", "<assistant>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with pad and end-of-sequence tokens and a chat template.

    The same texts give the same tokenizer. Any text can be encoded, since single bytes are tokens too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_CHAT_TEMPLATE
    )


def build_world_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the embedded world; it does not depend on the seed."""
    return build_tokenizer(text for record in generate_records(seed=0, count=4000) for text in record.values())
