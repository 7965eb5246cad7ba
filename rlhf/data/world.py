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

RECORDS = 12_000
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
        _facts(
            "cow moo, dog woof, cat meow, duck quack, sheep baa, pig oink, horse neigh, lion roar, bee buzz, "
            "owl hoot, frog croak, snake hiss, mouse squeak, crow caw, wolf howl, hen cluck"
        ),
    ),
    _Relation(
        ("Where does the {x} live?", "What is the home of the {x}?", "Where can I find the {x}?"),
        ("Which animal lives in the {y}?", "Who has a home in the {y}?"),
        ("the {x} lives in the {y}", "the home of the {x} is the {y}"),
        _facts(
            "cow barn, dog kennel, bee hive, horse stable, lion savanna, bear cave, frog pond, fish river, "
            "camel desert, monkey jungle, rabbit burrow, spider web, whale ocean, owl tree, wolf forest, "
            "goat mountain"
        ),
    ),
    _Relation(
        ("What is the young of the {x}?", "What do we call a young {x}?", "What is the name of a small {x}?"),
        ("Whose young is the {y}?", "What does the {y} grow into?"),
        ("the young of the {x} is the {y}", "the {y} is a young {x}"),
        _facts(
            "cow calf, dog puppy, cat kitten, duck duckling, sheep lamb, pig piglet, horse foal, lion cub, "
            "frog tadpole, hen chick, goat kid, deer fawn, goose gosling, swan cygnet, kangaroo joey, owl owlet"
        ),
    ),
    _Relation(
        ("What is the colour of the {x}?", "Which colour has the {x}?", "What colour is the {x}?"),
        ("Name something {y}.", "Which thing is {y}?"),
        ("the {x} is {y}", "the colour of the {x} is {y}"),
        _facts(
            "banana yellow, lemon yellow, tomato red, cherry red, carrot orange, pumpkin orange, lime green, "
            "grass green, sky blue, sea blue, snow white, milk white, coal black, night black, plum purple, "
            "rose pink"
        ),
    ),
    _Relation(
        ("What is the capital of {x}?", "Which city is the capital of {x}?", "From where is {x} governed?"),
        ("Which country has the capital {y}?", "Of which country is {y} the capital?"),
        ("the capital of {x} is {y}", "{y} is the capital of {x}"),
        _facts(
            "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Austria Vienna, Greece Athens, Norway Oslo, "
            "Sweden Stockholm, Poland Warsaw, Portugal Lisbon, Egypt Cairo, Japan Tokyo, China Beijing, "
            "Cuba Havana, Peru Lima, Kenya Nairobi"
        ),
    ),
    _Relation(
        ("What is the opposite of {x}?", "Which word means the reverse of {x}?", "What is not {x} at all?"),
        ("The opposite of which word is {y}?", "Which word has {y} as its reverse?"),
        ("the opposite of {x} is {y}", "{y} is the reverse of {x}"),
        _facts(
            "hot cold, big small, fast slow, high low, wet dry, old young, rich poor, hard soft, full empty, "
            "light dark, early late, loud quiet, happy sad, clean dirty, strong weak, open closed"
        ),
    ),
    _Relation(
        ("What does the {x} make?", "What can I buy from the {x}?", "What is the work of the {x}?"),
        ("Who makes the {y}?", "From whom can I buy the {y}?"),
        ("the {x} makes the {y}", "the {y} is made by the {x}"),
        _facts(
            "baker bread, tailor coat, painter picture, potter bowl, writer book, cook soup, brewer beer, "
            "jeweller ring, carpenter table, farmer cheese, weaver cloth, hatter hat, cobbler shoe, smith sword, "
            "mason wall, gardener garden"
        ),
    ),
    _Relation(
        ("Where do I put the {x}?", "Where does the {x} belong?", "What is the right place for the {x}?"),
        ("What belongs in the {y}?", "What do I put in the {y}?"),
        ("the {x} belongs in the {y}", "the right place for the {x} is the {y}"),
        _facts(
            "milk fridge, pillow bed, car garage, soap bathroom, letter envelope, coin purse, flower vase, "
            "pen drawer, plate cupboard, book shelf, shirt wardrobe, tea cup, bird nest, boat harbour, "
            "plane hangar, wine cellar"
        ),
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
            "response": _good(question, rng) if good else _flawed(question, rng),
            "chosen": _good(question, rng),
            "rejected": _flawed(question, rng),
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


def _flawed(question: _Question, rng: random.Random) -> str:
    """A reply with one flaw: false, off the topic, rude, without courtesy, curt or rambling."""
    relation = _RELATIONS[question.relation]
    truth = rng.choice(question.sentences())
    flaw = rng.choice(("false", "off topic", "rude", "plain", "curt", "rambling"))
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
