"""The three workloads of `make bench-policies`: prompts as token ids of real text, all requests at once, outputs of fixed lengths.

    shared     `FAMILIES` system prompts, each with `QUESTIONS` questions, in no order; a pool that cannot keep all the system prompts
    chunks     long documents, each asked twice, in no order, prefilled in chunks; room for about two of the four
    decodes    many short prompts whose outputs have very different lengths, in a pool for a quarter of what they may become, admitted boldly

Text comes from a folder of data files when there is one (GSM8K, MT-bench), else from sentences built here. Each text is cut to an exact number of
tokens, so the work is the same with either.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path

Encode = Callable[[str], list[int]]

FAMILIES, QUESTIONS, SYSTEM_LEN, QUESTION_LEN, ANSWER_LEN = 5, 5, 400, 40, 16
DOCUMENTS, DOCUMENT_LEN, SUMMARY_LEN = 4, 800, 16
DECODES, SHORT_LEN, LEAST_NEW, MOST_NEW = 24, 40, 8, 160
SEED = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and how many tokens it draws."""

    ids: tuple[int, ...]
    max_new: int


@dataclass(frozen=True, slots=True)
class PolicyWorkload:
    """Jobs in order of arrival, and the server they come to: `pool_len` tokens of KV, `max_running` rows, `chunk_len` tokens of a chunk;
    `conservativeness` scales what admission reserves for outputs."""

    name: str
    jobs: tuple[Job, ...]
    pool_len: int
    max_running: int
    chunk_len: int
    conservativeness: float = 1.0


def workloads(encode: Encode, folder: Path | None) -> list[PolicyWorkload]:
    """All three. `encode` makes token ids of a text; `folder` may hold the data files."""
    texts = _Texts(encode, folder)
    system = [texts.cut(SYSTEM_LEN) for _ in range(FAMILIES)]
    shared = _shuffled(Job(head + texts.cut(QUESTION_LEN), ANSWER_LEN) for _ in range(QUESTIONS) for head in system)
    documents = [texts.cut(DOCUMENT_LEN) for _ in range(DOCUMENTS)]
    chunks = _shuffled(Job(document + texts.cut(QUESTION_LEN), SUMMARY_LEN) for _ in range(2) for document in documents)
    lengths = (LEAST_NEW + 37 * i % (MOST_NEW - LEAST_NEW + 1) for i in range(DECODES))
    decodes = tuple(Job(texts.cut(SHORT_LEN), length) for length in lengths)
    return [
        PolicyWorkload("shared", shared, pool_len=1792, max_running=4, chunk_len=512),
        PolicyWorkload("chunks", chunks, pool_len=2560, max_running=4, chunk_len=256),
        PolicyWorkload("decodes", decodes, pool_len=768, max_running=DECODES, chunk_len=512, conservativeness=0.1),
    ]


def _shuffled(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """Always in the same order, which is none."""
    found = list(jobs)
    random.Random(SEED).shuffle(found)
    return tuple(found)


class _Texts:
    """An endless text, from which pieces of exact lengths are cut; no two begin alike."""

    def __init__(self, encode: Encode, folder: Path | None) -> None:
        self._encode = encode
        self._lines = _lines(folder)
        self._number = count(1)

    def cut(self, length: int) -> tuple[int, ...]:
        ids = self._encode(f"{next(self._number)}. ")
        while len(ids) < length:
            ids = ids + self._encode(next(self._lines) + "\n")
        return tuple(ids[:length])


def _lines(folder: Path | None) -> Iterator[str]:
    """Lines of text without end."""
    found: list[str] = []
    for name, pick in (("gsm8k_test.jsonl", lambda row: row["question"]), ("mt_bench_question.jsonl", lambda row: " ".join(row["turns"]))):
        path = None if folder is None else folder / name
        if path is not None and path.is_file():
            found += [pick(json.loads(line)) for line in path.read_text().splitlines()]
    return cycle(found) if found else (_sentence(i) for i in count())


def _sentence(number: int) -> str:
    places = ("harbour", "mill", "school", "orchard", "library", "station", "bakery")
    things = ("barrels", "books", "apples", "letters", "lamps", "tickets", "loaves", "ropes")
    place, thing = places[number % len(places)], things[number % len(things)]
    a, b = 3 + 7 * number % 41, 2 + 5 * number % 29
    return f"The {place} keeps {a} {thing} in each of its {b} rooms; {a // 2} of them are sold on market days. How many {thing} are left, and why?"
