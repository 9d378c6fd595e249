"""Tiny random models that pool, and what transformers computes with them: a part of make_models.py.

An embeddings model `embed`, whose vectors are those of the first token, and a cross encoder `rank`.
"""

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LENGTH = 128


def make(directory: Path, texts: dict[str, Any]) -> dict[str, Any]:
    """The numbers of these texts."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.5,  # vectors of different texts are far apart
        "pad_token_id": 0,
    }
    embed = BertModel(BertConfig(**sizes, matryoshka_dimensions=[16, 32, 64])).eval()
    save(embed, tokenizer, directory / "embed")
    rank = BertForSequenceClassification(BertConfig(**sizes, num_labels=1)).eval()
    save(rank, tokenizer, directory / "rank")
    with torch.no_grad():
        return compute(embed, rank, directory, texts)


def make_tokenizer() -> Tokenizer:
    """A token a letter, as BERT's tokenizer divides a word without known parts."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def save(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = ("pad_token", "unk_token", "cls_token", "sep_token")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LENGTH}
    settings |= dict(zip(names, SPECIAL, strict=True))
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def compute(
    embed: PreTrainedModel, rank: PreTrainedModel, directory: Path, texts: dict[str, Any]
) -> dict[str, Any]:
    tokenize = AutoTokenizer.from_pretrained(directory / "embed")

    def raw(ids: list[int]) -> torch.Tensor:
        return embed(torch.tensor([ids])).last_hidden_state[0, 0]

    def normal(vector: torch.Tensor) -> list[float]:
        return [float(one) for one in vector / vector.norm()]

    def score(document: str) -> float:
        pair = tokenize(texts["query"], document, return_tensors="pt")
        return float(rank(**pair).logits.sigmoid())

    found = [raw(tokenize(text).input_ids) for text in texts["texts"]]
    return {
        "vectors": [normal(one) for one in found],
        "raw": [one.tolist() for one in found],
        "short": [normal(one[:16]) for one in found],
        "ids": normal(raw(texts["ids"])),
        "scores": [score(one) for one in texts["documents"]],
    }
