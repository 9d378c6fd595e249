"""Train the demo model from nothing and export it to `1/`; or, with --evaluate, measure it.

    python models/demo/train.py              a quarter to half an hour on two CPU cores
    python models/demo/train.py --evaluate   bits per byte on held-out files, and samples

Needs torch, tokenizers, safetensors and numpy; no network. README.md has the results.
"""

import argparse
import csv
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Corpus, build_corpus
from evaluate import report
from llama import Llama, Shape, save
from tokenizer import (
    END_OF_TEXT_TOKEN,
    SpaceSplitter,
    encode_documents,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).parent
EXPORT = HERE / "1"
SEED = 20
SPLIT_SHARE = 0.08  # of the tokens that begin with a space, see SpaceSplitter


@dataclass(frozen=True)
class Recipe:
    """The training run. The long phase teaches positions up to the full context."""

    steps: int = 1450
    tokens_a_step: int = 4096
    short_length: int = 256
    long_length: int = 1024
    long_from: float = 0.9  # share of the steps after which windows are long
    warmup_steps: int = 50
    decay_from: float = 0.4  # share of the steps after which the learning rate falls to zero
    matrix_rate: float = 0.02  # Muon: size of a step relative to the matrix's own scale
    vector_rate: float = 3e-3  # AdamW: embedding and norms
    weight_decay: float = 0.05
    export_every: int = 250


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for the matrices inside the layers.

    Each singular direction of the gradient moves the matrix equally far, which needs about half
    of AdamW's steps at this size. Newton-Schulz iteration stands in for the decomposition.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": rate, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # no loss is returned
        """Move every matrix by one orthogonal step."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are all about one, by five quintic steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    estimate: Tensor = (wide / (wide.norm() + 1e-7)).bfloat16()
    for _ in range(5):
        gram = estimate @ estimate.T
        estimate = 3.4445 * estimate + (-4.7750 * gram + 2.0315 * gram @ gram) @ estimate
    return (estimate.T if tall else estimate).to(matrix.dtype)


def windows(
    documents: list[Tensor], split: SpaceSplitter, length: int, seed: int
) -> Iterator[Tensor]:
    """Windows of `length` + 1 tokens over the documents, shuffled again in every epoch.

    Each begins with END_OF_TEXT, as prompts do: what follows it may be any place of a document.
    """
    shuffle = random.Random(seed)
    while True:
        shuffle.shuffle(documents)
        stream = split(torch.cat(documents))
        start = shuffle.randrange(length)  # windows begin elsewhere in every epoch
        offsets = list(range(start, len(stream) - length - 1, length))
        shuffle.shuffle(offsets)
        for offset in offsets:
            window = stream[offset : offset + length + 1].clone()
            window[0] = END_OF_TEXT_TOKEN
            yield window


def rate_factor(recipe: Recipe, step: int) -> float:
    """Share of the full learning rate at `step`: up, flat, then down to zero in a line."""
    decay_start = recipe.steps * recipe.decay_from
    remaining = (recipe.steps - step) / (recipe.steps - decay_start)
    return min(1.0, (step + 1) / recipe.warmup_steps, remaining)


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embedding = model.model.embed_tokens.weight
    return [
        Muon(matrices, recipe.matrix_rate, recipe.weight_decay),
        torch.optim.AdamW(
            [
                {"params": [embedding], "weight_decay": recipe.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=recipe.vector_rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


def train(recipe: Recipe, corpus: Corpus, curve: Path) -> None:
    """Train from nothing, exporting to EXPORT now and then and at the end; losses go to `curve`."""
    tokenizer = train_tokenizer(corpus.training, Shape.vocab_size)
    save_tokenizer(tokenizer, EXPORT, Shape.max_position_embeddings)
    documents = encode_documents(tokenizer, corpus.training + corpus.exchanges)
    validation = torch.cat(encode_documents(tokenizer, corpus.held_out))
    print(f"{sum(map(len, documents)):,} training tokens, {len(validation):,} held out", flush=True)

    torch.manual_seed(SEED)
    model = Llama(Shape())
    optimizers = make_optimizers(model, recipe)
    full_rates = [[group["lr"] for group in each.param_groups] for each in optimizers]
    split = SpaceSplitter(tokenizer, SPLIT_SHARE, SEED)
    short = windows(list(documents), split, recipe.short_length, SEED)
    long = windows(list(documents), split, recipe.long_length, SEED + 1)
    started = time.monotonic()
    running = math.nan
    with curve.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("step", "tokens", "seconds", "training_loss", "held_out_loss"))
        for step in range(recipe.steps):
            stage, length = (
                (short, recipe.short_length)
                if step < recipe.steps * recipe.long_from
                else (long, recipe.long_length)
            )
            batch = torch.stack([next(stage) for _ in range(recipe.tokens_a_step // length)])
            factor = rate_factor(recipe, step)
            for optimizer, rates in zip(optimizers, full_rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
            loss = train_step(model, optimizers, batch)
            running = loss if math.isnan(running) else 0.95 * running + 0.05 * loss
            if (step + 1) % recipe.export_every == 0 or step + 1 == recipe.steps:
                save(model, EXPORT, END_OF_TEXT_TOKEN)
                row = (
                    step + 1,
                    (step + 1) * recipe.tokens_a_step,
                    round(time.monotonic() - started),
                    round(running, 3),
                    round(quick_loss(model, validation, recipe.long_length), 3),
                )
                table.writerow(row)
                file.flush()
                print(*row, flush=True)


def train_step(model: Llama, optimizers: list[torch.optim.Optimizer], batch: Tensor) -> float:
    """One update on `batch`; returns its mean loss in nats a token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def quick_loss(model: Llama, tokens: Tensor, length: int) -> float:
    """Mean loss in nats a token on a sixteenth of `tokens`, to watch training by."""
    starts = range(0, len(tokens) - length - 1, length * 16)
    batch = torch.stack([tokens[start : start + length + 1] for start in starts])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).item()


def main() -> None:
    """Read the command line and train or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--evaluate", action="store_true", help="measure the exported model")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="updates to train for")
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    corpus = build_corpus()
    if not arguments.evaluate:
        EXPORT.mkdir(exist_ok=True)
        train(Recipe(steps=arguments.steps), corpus, HERE / "training.csv")
    report(EXPORT, load_tokenizer(EXPORT), corpus)


if __name__ == "__main__":
    main()
