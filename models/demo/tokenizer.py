"""A byte-level BPE tokenizer for source code, and the files transformers and vLLM read it from."""

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_TOKEN = 0
BYTE_LEVEL_SPACE = "\u0120"  # how byte-level BPE spells a space

# A line's indentation stays with its newline and is one piece, as are words (with the space
# before them), runs of digits up to three, and runs of punctuation.
PIECES = r" ?[A-Za-z_]+| ?[0-9]{1,3}|\n[ ]*|[ \t]+(?=\S)| ?[^\sA-Za-z0-9_]+|\s+"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Learn merges on `texts`; END_OF_TEXT comes first, and a prompt begins with it.

    To the model that is where a document begins. A first token stands where attention rests when
    it has nothing to look at, so a word there would hardly be read.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_TOKEN)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read what `save_tokenizer` wrote."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """The tokens of each text, END_OF_TEXT after it."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [torch.tensor([*encoding.ids, END_OF_TEXT_TOKEN]) for encoding in encodings]


class SpaceSplitter:
    """Splits a few of the tokens that begin with a space into the space and the rest.

    Words are read with the space before them, so a prompt that ends in a space ("def ") would
    otherwise be a sight the model never had.
    """

    def __init__(self, tokenizer: Tokenizer, share: float, seed: int) -> None:
        vocabulary = tokenizer.get_vocab()
        self.share = share
        self.space = vocabulary[BYTE_LEVEL_SPACE]
        self.generator = torch.Generator().manual_seed(seed)
        # For each token that begins with a space, the token of the rest; elsewhere -1.
        self.rest = torch.full((len(vocabulary),), -1)
        for text, token in vocabulary.items():
            if text.startswith(BYTE_LEVEL_SPACE) and text[1:] in vocabulary:
                self.rest[token] = vocabulary[text[1:]]

    def __call__(self, stream: Tensor) -> Tensor:
        """The stream with a fresh random `share` of those tokens split."""
        chance = torch.rand(len(stream), generator=self.generator)
        chosen = (self.rest[stream] >= 0) & (chance < self.share)
        pieces = 1 + chosen.long()
        longer = stream.repeat_interleave(pieces)
        rest_at = pieces.cumsum(0)[chosen] - 1
        longer[rest_at - 1] = self.space
        longer[rest_at] = self.rest[stream[chosen]]
        return longer
