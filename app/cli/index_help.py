"""Texts of `python -m app index --help`."""

EPILOG = """examples:
  python -m app index build news/ --name news --model demo
      indexes every .txt and .jsonl file below news/ with the tokenizer of the model demo
  python -m app index build wiki.jsonl.gz --name wiki --tokenizer path/to/tokenizer.json
  LLM_INDEXES_FILE=indexes.toml python -m app index list
  LLM_INDEXES_FILE=indexes.toml python -m app index check news

An index returns how often any sequence of tokens occurs in a corpus, and where. The service opens
the indexes that the TOML file LLM_INDEXES_FILE declares; `build` adds its index to that file.
More: docs/infini_gram.md."""

BUILD_EPILOG = """A corpus is a .txt or .jsonl file, or a directory of them, plain or compressed (.gz, .bz2, .xz).
Each line of a .jsonl file is a document: {"text": "...", and any other members as its metadata}.
A .txt file is one document; --split takes its blocks or its lines instead.

For the outputs of one model, use that model's own tokenizer (--model, --tokenizer). Token ids from
65535 take four bytes each instead of two. `bytes` needs none and finds any piece of text.

The index is complete when the command ends with status 0. If it fails or is interrupted, no files
are left. Status 2: the input was wrong; one line names the place and the error."""

ADOPT_EPILOG = """Checks the files, and writes manifest.json with their sizes and checksums beside them. From then on
the service opens the index, and notices changes of its files. The tokenizer must be the one that the
index was built with; the command cannot verify that completely. The files' sizes show whether a token
has two bytes or four. A directory that has a manifest already is taken as it is."""


DOWNLOAD_EPILOG = """A public bucket is listed by S3's own route; below another URL the files are looked for by their names.
Each file is checked for its size, and for its MD5 where the bucket has it. Then import the index with
`index adopt`."""


REMOVE_EPILOG = """examples:
  python -m app index remove news 17 a.jsonl:204
  python -m app index remove news --by url --from takedown.txt

Builds an index of the removed documents in NAME.removed beside the index, and declares it. Then no query
counts or returns them. The index itself stays unchanged: its files still hold their text. The documents are
back if the line `removed` is deleted from the file of declarations."""
