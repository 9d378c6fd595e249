"""Make tiny random models that pool: `python make_pooling_models.py DIRECTORY`.

Runs in Triton's environment. DIRECTORY gets an embeddings model `embed`, a cross encoder `rank`, and
vLLM's own vectors and scores of the texts in DIRECTORY/texts.json, as DIRECTORY/expected.json.
"""

import json
import os
import string
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedModel
from vllm import LLM, PoolingParams

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LENGTH = 128
ENGINE: dict[str, Any] = {
    "runner": "pooling",
    "dtype": "float32",
    "max_model_len": LENGTH,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
}


def main() -> None:
    directory = Path(sys.argv[1])
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
    embed = BertConfig(**sizes, matryoshka_dimensions=[16, 32, 64])
    save(BertModel(embed), tokenizer, directory / "embed")
    rank = BertConfig(**sizes, num_labels=1)
    save(BertForSequenceClassification(rank), tokenizer, directory / "rank")
    expected = compute(directory, json.loads((directory / "texts.json").read_text()))
    (directory / "expected.json").write_text(json.dumps(expected))


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


def compute(directory: Path, texts: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own results, one text at a time: the last digits depend on the engine's batch."""
    return vectors(directory, texts) | {"scores": scores(directory, texts)}


def vectors(directory: Path, texts: dict[str, Any]) -> dict[str, Any]:
    model = LLM(model=str(directory / "embed"), **ENGINE)

    def vector(prompt: Any, **parameters: Any) -> list[float]:
        (output,) = model.embed([prompt], pooling_params=PoolingParams(**parameters))
        return list(output.outputs.embedding)

    return {
        "vectors": [vector(text) for text in texts["texts"]],
        "raw": [vector(text, use_activation=False) for text in texts["texts"]],
        "short": [vector(text, dimensions=16) for text in texts["texts"]],
        "ids": vector({"prompt_token_ids": texts["ids"]}),
    }


def scores(directory: Path, texts: dict[str, Any]) -> list[float]:
    model = LLM(model=str(directory / "rank"), **ENGINE)
    return [model.score(texts["query"], one)[0].outputs.score for one in texts["documents"]]


if __name__ == "__main__":
    main()
