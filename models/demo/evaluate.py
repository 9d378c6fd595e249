"""Held-out bits per byte of the demo model and of its n-gram baselines, and samples of its text."""

import math
from pathlib import Path

import numpy as np
import torch
from corpus import Corpus
from llama import Llama, load
from ngram import Integers, KneserNey
from tokenizer import END_OF_TEXT_TOKEN, encode_documents
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

NGRAM_ORDER = 5
PROMPTS = (
    "def ",
    "import os\nimport ",
    "class Stack:\n",
    "The json module ",
    "# What is os.path.join?\n\n",
    "# Return the number of lines in a file.\n\n",
)
SAMPLE_TOKENS = 80
TEMPERATURE = 0.8
SEED = 7


def report(directory: Path, tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Print the figures of README.md, then samples."""
    model = load(directory)
    size = sum(len(text.encode()) for text in corpus.held_out)
    rows = {
        "the demo model": model_bits(model, encode_documents(tokenizer, corpus.held_out)),
        f"{NGRAM_ORDER}-gram over the model's tokens": ngram_bits(
            _tokens(tokenizer, corpus.training),
            _tokens(tokenizer, corpus.held_out),
            tokenizer.get_vocab_size(),
        ),
        f"{NGRAM_ORDER}-gram over bytes": ngram_bits(
            _bytes(corpus.training), _bytes(corpus.held_out), alphabet=257
        ),
    }
    print(f"\nHeld out: {len(corpus.held_out)} documents, {size:,} bytes. Bits per byte:")
    for name, bits in rows.items():
        print(f"  {bits / size:.3f}  {name}")
    for prompt in PROMPTS:
        for name, temperature in (("greedy", 0.0), (f"temperature {TEMPERATURE}", TEMPERATURE)):
            text = generate(model, tokenizer, prompt, SAMPLE_TOKENS, temperature)
            print(f"\n--- {name}\n{prompt}{text}")


@torch.no_grad()
def model_bits(model: Llama, documents: list[Tensor]) -> float:
    """Information in `documents` under the model, in bits.

    Every document is read after END_OF_TEXT, in windows of the full context that overlap by half:
    save at its start, a token is predicted from at least half a context.
    """
    length = model.shape.max_position_embeddings
    nats = 0.0
    for document in documents:
        stream = torch.cat((document[-1:], document))
        scored = 1  # tokens of `stream` up to here have been predicted
        while scored < len(stream):
            start = 0 if scored == 1 else scored - length // 2
            window = stream[start : start + length + 1]
            logits = model(window[None, :-1])[0]
            fresh = slice(scored - start - 1, None)
            nats += functional.cross_entropy(
                logits[fresh], window[1:][fresh], reduction="sum"
            ).item()
            scored = start + len(window)
    return nats / math.log(2)


def ngram_bits(training: list[Integers], held_out: list[Integers], alphabet: int) -> float:
    """Information in `held_out` under the n-gram model of `training`, in bits."""
    return KneserNey(training, NGRAM_ORDER, alphabet).bits(held_out)


@torch.no_grad()
def generate(
    model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int, temperature: float
) -> str:
    """Continuation of `prompt`: greedy at temperature 0, otherwise sampled with a fixed seed."""
    generator = torch.Generator().manual_seed(SEED)
    prompt_tokens = tokenizer.encode(prompt).ids
    tokens = torch.tensor([prompt_tokens])
    for _ in range(max_tokens):
        logits = model(tokens[:, -model.shape.max_position_embeddings :])[0, -1]
        if temperature:
            weights = torch.softmax(logits / temperature, dim=-1)
            chosen = torch.multinomial(weights, 1, generator=generator)
        else:
            chosen = logits.argmax(dim=-1, keepdim=True)
        if chosen.item() == END_OF_TEXT_TOKEN:
            break
        tokens = torch.cat((tokens, chosen[None]), dim=1)
    text: str = tokenizer.decode(tokens[0, len(prompt_tokens) :].tolist())
    return text


def _bytes(texts: list[str]) -> list[Integers]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]


def _tokens(tokenizer: Tokenizer, texts: list[str]) -> list[Integers]:
    """The tokens of each text, moved down by one: END_OF_TEXT, token 0, is the last symbol."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array(encoding.ids) - 1 for encoding in encodings]
