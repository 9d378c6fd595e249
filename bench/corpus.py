"""A corpus of any size from a seed: words in a Markov chain, in documents of JSON lines.

Words follow Zipf's law, and each is followed by a few others most of the time, so that sequences
repeat as they do in text: short ones often, long ones sometimes. Some documents hold a piece of an
earlier one.
"""

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import orjson
import tokenizers

_WORDS = 20_000
_FOLLOWERS = 12
_NEW_SENTENCE = 0.07
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_VOCABULARY = 8000
_COPIED = 0.2  # of the documents hold a piece of an earlier one


def texts(seed: int) -> Iterator[str]:
    """Documents without an end; the same for the same seed."""
    chance = random.Random(seed)
    words = _words(chance)
    weights = list(accumulate(1 / (rank + 2) for rank in range(_WORDS)))
    followers: dict[str, list[str]] = {}
    earlier: list[str] = []
    while True:
        written = list(_write(chance, words, weights, followers, chance.randint(5, 400)))
        if earlier and chance.random() < _COPIED:
            copied = chance.choice(earlier).split(" ")
            start = chance.randrange(len(copied))
            place = chance.randrange(len(written))
            written[place:place] = copied[start : start + chance.randint(3, 60)]
        text = " ".join(written)
        if len(earlier) < 1000:
            earlier.append(text)
        elif chance.random() < 0.01:
            earlier[chance.randrange(1000)] = text
        yield text


def write_corpus(file: Path, size: int, seed: int) -> None:
    """Write documents until the file has `size` bytes."""
    done = 0
    with file.open("wb") as target:
        for number, text in enumerate(texts(seed)):
            done += target.write(orjson.dumps({"text": text, "number": number}) + b"\n")
            if done >= size:
                return


def train_tokenizer(file: Path, seed: int, documents: int = 2000) -> None:
    """Write a tokenizer.json of byte-level pairs, trained on the first documents of the seed."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    source = texts(seed)
    made.train_from_iterator(
        (next(source) for _ in range(documents)),
        tokenizers.trainers.BpeTrainer(
            vocab_size=_VOCABULARY,
            show_progress=False,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made.save(str(file))


def _words(chance: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < _WORDS:
        length = min(14, 1 + int(chance.expovariate(0.25)))
        letters = chance.choices(_LETTERS, weights=range(len(_LETTERS), 0, -1), k=length)
        found["".join(letters)] = None
    words = sorted(found, key=len)
    # A few that need more than a byte a letter.
    return [
        word + chance.choice("éßñ") if rank % 97 == 96 else word for rank, word in enumerate(words)
    ]


def _write(
    chance: random.Random,
    words: list[str],
    weights: list[float],
    followers: dict[str, list[str]],
    length: int,
) -> Iterator[str]:
    word = ""
    for _ in range(length):
        if word in followers and chance.random() < 0.8:
            word = chance.choice(followers[word])
        else:
            last, word = word, chance.choices(words, cum_weights=weights)[0]
            known = followers.setdefault(last, [])
            if len(known) < _FOLLOWERS:
                known.append(word)
        ending = chance.random()
        yield word + (".\n" if ending < 0.01 else "." if ending < _NEW_SENTENCE else "")
