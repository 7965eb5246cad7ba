"""The embedded default: a small world of questions, with replies of every quality, made from a seed.

Each record has a demonstration (`response`, imperfect as those of hurried people), a preferred and a
dispreferred reply. What a good reply is, a grammar says: one polite, true and complete sentence that
answers the question. `approves` asks that grammar; training never does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

RECORDS = 16_000
GOOD_DEMONSTRATIONS = 0.45  # the part of demonstrations that the rule approves

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
_FLAWS = ("false", "off topic", *_HURRIED)


def _facts(text: str) -> dict[str, str]:
    """`cow moo, dog woof` as a mapping."""
    return dict(pair.split() for pair in text.split(","))


@dataclass(frozen=True)
class _Relation:
    """Facts of one kind: questions for y given x, questions for x given y, and sentences that state a fact."""

    asks_y: tuple[str, ...]
    asks_x: tuple[str, ...]
    states: tuple[str, ...]
    facts: dict[str, str]


_RELATIONS = (
    _Relation(
        ("What does the {x} say?", "What sound does the {x} make?", "How does the {x} sound?"),
        ("Which animal says {y}?", "Who makes the sound {y}?"),
        ("the {x} says {y}", "the sound of the {x} is {y}"),
        _facts("cow moo, dog woof, cat meow, duck quack, sheep baa, pig oink, horse neigh, lion roar"),
    ),
    _Relation(
        ("Where does the {x} live?", "What is the home of the {x}?", "Where can I find the {x}?"),
        ("Which animal lives in the {y}?", "Who has a home in the {y}?"),
        ("the {x} lives in the {y}", "the home of the {x} is the {y}"),
        _facts("cow barn, dog kennel, bee hive, horse stable, lion savanna, bear cave, frog pond, fish river"),
    ),
    _Relation(
        ("What is the young of the {x}?", "What do we call a young {x}?", "What is the name of a small {x}?"),
        ("Whose young is the {y}?", "What does the {y} grow into?"),
        ("the young of the {x} is the {y}", "the {x} has the young called {y}"),
        _facts("cow calf, dog puppy, cat kitten, duck duckling, sheep lamb, pig piglet, horse foal, lion cub"),
    ),
    _Relation(
        ("What is the colour of the {x}?", "Which colour has the {x}?", "What colour is the {x}?"),
        ("Name something {y}.", "Which thing is {y}?"),
        ("the {x} is {y}", "the colour of the {x} is {y}"),
        _facts("banana yellow, tomato red, carrot orange, grass green, sky blue, snow white, coal black, plum purple"),
    ),
    _Relation(
        ("What is the capital of {x}?", "Which city is the capital of {x}?", "From where is {x} governed?"),
        ("Which country has the capital {y}?", "Of which country is {y} the capital?"),
        ("the capital of {x} is {y}", "{x} has the capital {y}"),
        _facts(
            "France Paris, Italy Rome, Spain Madrid, Austria Vienna, "
            "Greece Athens, Norway Oslo, Egypt Cairo, Cuba Havana"
        ),
    ),
    _Relation(
        ("What is the opposite of {x}?", "Which word means the reverse of {x}?", "What is the reverse of {x}?"),
        ("The opposite of which word is {y}?", "Which word has {y} as its reverse?"),
        ("the opposite of {x} is {y}", "the reverse of {x} is {y}"),
        _facts("hot cold, big small, fast slow, high low, wet dry, rich poor, hard soft, full empty"),
    ),
)


@dataclass(frozen=True)
class _Question:
    """One question about one fact (or, asking for x, about all facts with this y)."""

    text: str
    relation: int
    x: str
    y: str
    asks_x: bool

    def sentences(self) -> list[str]:
        """Every true answer, in lower case and without a full stop."""
        relation = _RELATIONS[self.relation]
        if not self.asks_x:
            return _states(relation, self.x, self.y)
        return [text for x, y in relation.facts.items() if y == self.y for text in _states(relation, x, y)]


def records(seed: int, count: int = RECORDS) -> Iterator[dict[str, str]]:
    """`count` records with the columns prompt, response, chosen and rejected."""
    rng = random.Random(f"world {seed}")
    questions = list(_questions().values())
    for _ in range(count):
        question = rng.choice(questions)
        good = rng.random() < GOOD_DEMONSTRATIONS
        yield {
            "prompt": rng.choice(_LEADS) + question.text,
            "response": _good(question, rng) if good else _flawed(question, _HURRIED, rng),
            "chosen": _good(question, rng),
            "rejected": _flawed(question, _FLAWS, rng),
        }


def approves(prompt: str, reply: str) -> bool:
    """Whether the reply is one polite, true, complete sentence; no reply to a prompt from elsewhere is."""
    lead = max((lead for lead in _LEADS if prompt.startswith(lead)), key=len)
    question = _questions().get(prompt.removeprefix(lead))
    return question is not None and reply.strip() in _good_replies(question)


@cache
def _questions() -> dict[str, _Question]:
    questions = {}
    for number, relation in enumerate(_RELATIONS):
        for x, y in relation.facts.items():
            for asks_x, patterns in ((False, relation.asks_y), (True, relation.asks_x)):
                for pattern in patterns:
                    text = pattern.format(x=x, y=y)
                    questions[text] = _Question(text, number, x, y, asks_x)
    return questions


@cache
def _good_replies(question: _Question) -> frozenset[str]:
    """Every reply that the rule approves."""
    return frozenset(
        _sentence(opener, text, closer)
        for text in question.sentences()
        for opener in ("", *_OPENERS)
        for closer in ("", *_CLOSERS)
        if opener or closer
    )


def _good(question: _Question, rng: random.Random) -> str:
    return _polite(rng.choice(question.sentences()), rng)


def _flawed(question: _Question, flaws: tuple[str, ...], rng: random.Random) -> str:
    """A reply with one of the flaws."""
    relation = _RELATIONS[question.relation]
    truth = rng.choice(question.sentences())
    flaw = rng.choice(flaws)
    if flaw == "false":
        if question.asks_x:
            lies = [(x, question.y) for x, y in relation.facts.items() if y != question.y]
        else:
            lies = [(question.x, y) for y in relation.facts.values() if y != question.y]
        return _polite(rng.choice(_states(relation, *rng.choice(lies))), rng)
    if flaw == "off topic":
        return _polite(_anything(rng, besides=question.relation), rng)
    if flaw == "rude" and rng.random() < 0.5:
        return _sentence(rng.choice(_RUDE_OPENERS), truth, "")
    if flaw == "rude":
        return _sentence("", truth, rng.choice(_RUDE_CLOSERS))
    if flaw == "plain":
        return _sentence("", truth, "")
    if flaw == "curt":
        return _sentence("", question.x if question.asks_x else question.y, "")
    return _sentence(rng.choice(_OPENERS), f"{truth} and {_anything(rng, besides=question.relation)}", "")


def _polite(text: str, rng: random.Random) -> str:
    """The text with an opening courtesy, a closing one, or both."""
    where = rng.choice(("opening", "opening", "closing", "both"))
    opener = rng.choice(_OPENERS) if where != "closing" else ""
    return _sentence(opener, text, rng.choice(_CLOSERS) if where != "opening" else "")


def _anything(rng: random.Random, *, besides: int) -> str:
    """A true sentence about something else."""
    relation = rng.choice([relation for number, relation in enumerate(_RELATIONS) if number != besides])
    x, y = rng.choice(list(relation.facts.items()))
    return rng.choice(_states(relation, x, y))


def _states(relation: _Relation, x: str, y: str) -> list[str]:
    return [pattern.format(x=x, y=y) for pattern in relation.states]


def _sentence(opener: str, text: str, closer: str) -> str:
    sentence = ", ".join(part for part in (opener, text, closer) if part)
    return f"{sentence[0].upper()}{sentence[1:]}."
