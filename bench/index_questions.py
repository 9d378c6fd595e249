"""Random requests of infini-gram API, and what the package infini-gram itself answers to them.

The package is asked by its own Python API, with nothing of `app`; the words around its answers
(`tokens`, `text`) are made by the library `tokenizers`. The benchmark asks the same questions.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson
import tokenizers

KINDS = (
    *("find", "find_cnf", "count", "count_cnf", "prob", "ntd", "infgram_prob", "infgram_ntd"),
    *("get_document_by_rank", "get_document_by_pointer", "get_document_by_index"),
    *("get_documents_by_index", "documents", "attribution"),
)
Wire = dict[str, Any]


class Speaks(Protocol):
    """A tokenizer, in the words that an answer needs."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def token(self, token_id: int) -> str: ...
    def pieces(self, text: str) -> list[str]: ...
    def starts(self) -> list[int]: ...


class FileWords:
    """Words of a tokenizer.json, by the library alone."""

    def __init__(self, file: Path) -> None:
        self._library = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        return self._library.id_to_token(token_id) or ""

    def pieces(self, text: str) -> list[str]:
        return _cut(text, self._library.encode(text, add_special_tokens=False).offsets)

    def starts(self) -> list[int]:
        return [token for word, token in self._library.get_vocab().items() if word[0] in "ĠĊ"]


class ByteWords:
    """Words of bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "backslashreplace")

    def pieces(self, text: str) -> list[str]:
        places = enumerate(text)
        return _cut(text, [(n, n + 1) for n, letter in places for _ in letter.encode()])

    def starts(self) -> list[int]:
        return [10, 32]


class Asker:
    """Makes requests of a corpus's own texts, mixed with such as it does not have."""

    def __init__(
        self, bare: "Bare", words: Speaks, texts: Sequence[str], vocab_size: int, seed: int
    ) -> None:
        self._bare = bare
        self._words = words
        self._texts = texts
        self._vocab_size = vocab_size
        self._chance = random.Random(seed)

    def body(self, kind: str) -> Any:
        """A request's body, or the query of `documents`."""
        make = getattr(self, f"_{kind}", self._query)
        return make()

    def ids(self, most: int = 8) -> list[int]:
        chance = self._chance
        ids: list[int] = []
        while not ids:
            whole = self._words.encode(chance.choice(self._texts))
            length = chance.randint(1, 500 if chance.random() < 0.05 else most)
            start = chance.randrange(max(1, len(whole) - length))
            ids = whole[start : start + length]
        kind = chance.random()
        if kind < 0.15:
            ids[chance.randrange(len(ids))] = chance.randrange(self._vocab_size)
        elif kind < 0.2:
            ids = [chance.randrange(self._vocab_size) for _ in ids]
        return ids

    def text(self, most: int = 60) -> str:
        chance = self._chance
        whole = chance.choice(self._texts)
        start = chance.randrange(max(1, len(whole) - most))
        text = whole[start : start + chance.randint(1, most)]
        return text + chance.choice(["", "", "", "x", " the", "ü"]) or "a"

    def _query(self) -> Wire:
        return {"query": self.ids() if self._chance.random() < 0.5 else self.text()}

    def _ntd(self) -> Wire:
        support = self._chance.choice([None, 1, 7, 100, 1000])
        return self._query() | {"maxSupport": support}

    _infgram_ntd = _ntd

    def _count_cnf(self) -> Wire:
        chance = self._chance
        query: Any = [
            [self.ids(3) for _ in range(chance.randint(1, 4))] for _ in range(chance.randint(1, 4))
        ]
        while sum(len(term) for clause in query for term in clause) > 500:
            query = query[:-1] or [[self.ids(3)[:3]]]
        if chance.random() < 0.5:
            query = " AND ".join(
                " OR ".join(self.text(12) for _ in range(chance.randint(1, 4)))
                for _ in range(chance.randint(1, 4))
            )
        return {
            "query": query,
            "maxClauseFreq": chance.choice([None, 5, 1000, 500_000]),
            "maxDiffTokens": chance.choice([None, 1, 20, 1000]),
        }

    _find_cnf = _count_cnf

    def _window(self, length: int) -> Wire:
        return {
            "needleLength": length,
            "maximumContextLength": self._chance.choice([0, 1, 10, 100]),
        }

    def _get_document_by_rank(self) -> Wire:
        while True:
            ids = self.ids(3)
            segments = self._bare.package.find(ids)["segment_by_shard"]
            places = [(shard, one) for shard, one in enumerate(segments) if one[0] < one[1]]
            if places:
                shard, (start, end) = self._chance.choice(places)
                rank = self._chance.randrange(start, end)
                return {"shard": shard, "rank": rank} | self._window(len(ids))

    def _get_document_by_pointer(self) -> Wire:
        while True:
            ids = self.ids(3)
            found = self._bare.package.find_cnf([[ids]], 1000, 10)["ptrs_by_shard"]
            places = [(s, one) for s, row in enumerate(found) for one in row if one % 2 == 0]
            if places:  # the package takes no odd pointer, though those of bytes may be
                shard, pointer = self._chance.choice(places)
                return {"shard": shard, "pointer": pointer} | self._window(len(ids))

    def _get_document_by_index(self) -> Wire:
        return {
            "documentIndex": self._chance.randrange(self._bare.package.get_total_doc_cnt()),
            "maximumContextLength": self._chance.choice([0, 1, 10, 1000]),
        }

    def _get_documents_by_index(self) -> list[Wire]:
        return [self._get_document_by_index() for _ in range(self._chance.randint(0, 5))]

    def _documents(self) -> Wire:
        return {
            "search": self.text(12),
            "maximum_document_display_length": self._chance.choice([1, 10, 50]),
            "page": self._chance.choice([0, 0, 0, 1, 5]),
            "page_size": self._chance.choice([1, 3, 10]),
        }

    def response(self, tokens: int) -> str:
        """A text of about so many tokens, of pieces of the corpus."""
        ids: list[int] = []
        while len(ids) < tokens:
            ids += self.ids(30)
        return self._words.decode(ids[:tokens])

    def _attribution(self) -> Wire:
        chance = self._chance
        return {
            "response": self.response(chance.randint(1, 120)),
            "delimiters": chance.choice([[], ["."], ["\n", "."]]),
            "allowSpansWithPartialWords": chance.random() < 0.5,
            "minimumSpanLength": chance.choice([1, 1, 2, 4]),
            "maximumFrequency": chance.choice([1, 10, 1000]),
            "maximumSpanDensity": chance.choice([0.05, 0.3, 1.0]),
            "spanRankingMethod": chance.choice(["length", "unigram_logprob_sum"]),
            "maximumDocumentsPerSpan": chance.choice([1, 5, 10]),
            "maximumContextLength": chance.choice([5, 250]),
            "maximumContextLengthLong": chance.choice([5, 100]),
            "maximumContextLengthSnippet": chance.choice([5, 40]),
        }


class Bare:
    """The package over the same directory."""

    def __init__(
        self,
        directory: Path,
        token_dtype: Literal["u8", "u16", "u32"],
        end_id: int,
        vocab_size: int,
        words: Speaks,
    ) -> None:
        from infini_gram.engine import InfiniGramEngine

        starts = directory.parent / f"{directory.name}-starts.txt"
        starts.write_text("".join(f"{one}\n" for one in words.starts()))
        self.name = directory.name
        self.package: Any = InfiniGramEngine(
            index_dir=str(directory),
            eos_token_id=end_id,
            vocab_size=vocab_size,
            token_dtype=token_dtype,
            bow_ids_path=str(starts),
            precompute_unigram_logprobs=True,
            attribution_block_size=256,
            ds_prefetch_depth=0,
            sa_prefetch_depth=0,
            od_prefetch_depth=0,
        )
        self._words = words

    def answer(self, kind: str, body: Any) -> Wire:
        """The expected response of the route."""
        return {"index": self.name, **getattr(self, f"_{kind}")(body)}

    def ids(self, query: str | list[int]) -> list[int]:
        return self._words.encode(query) if isinstance(query, str) else query

    def _asked(self, ids: list[int]) -> Wire:
        return {"tokenIds": ids, "tokens": [self._words.token(one) for one in ids]}

    def _find(self, body: Wire) -> Wire:
        ids = self.ids(body["query"])
        found = self.package.find(ids)
        segments = [list(one) for one in found["segment_by_shard"]]
        return self._asked(ids) | {"cnt": found["cnt"], "segmentByShard": segments}

    def _count(self, body: Wire) -> Wire:
        ids = self.ids(body["query"])
        return {**self._asked(ids), **self.package.count(ids)}

    def _cnf(self, body: Wire) -> tuple[Any, Wire]:
        query = body["query"]
        if isinstance(query, str):
            query = [
                [self._words.encode(term) for term in clause.split(" OR ")]
                for clause in query.split(" AND ")
            ]
        tokens = [[[self._words.token(one) for one in term] for term in clause] for clause in query]
        return query, {"tokenIds": query, "tokens": tokens}

    def _find_cnf(self, body: Wire) -> Wire:
        cnf, asked = self._cnf(body)
        found = self.package.find_cnf(cnf, body["maxClauseFreq"], body["maxDiffTokens"])
        return asked | {
            "cnt": found["cnt"],
            "approx": found["approx"],
            "ptrsByShard": found["ptrs_by_shard"],
        }

    def _count_cnf(self, body: Wire) -> Wire:
        cnf, asked = self._cnf(body)
        return {
            **asked,
            **self.package.count_cnf(cnf, body["maxClauseFreq"], body["maxDiffTokens"]),
        }

    def _prob(self, body: Wire) -> Wire:
        ids = self.ids(body["query"])
        found = self.package.prob(ids[:-1], ids[-1])
        return self._asked(ids) | _prob(found)

    def _ntd(self, body: Wire) -> Wire:
        ids = self.ids(body["query"])
        return self._asked(ids) | self._distribution(self.package.ntd(ids, body["maxSupport"]))

    def _distribution(self, found: Wire) -> Wire:
        return {
            "promptCnt": found["prompt_cnt"],
            "approx": found["approx"],
            "resultByTokenId": {
                str(one): {
                    "contCnt": row["cont_cnt"],
                    "prob": row["prob"],
                    "token": self._words.token(one),
                }
                for one, row in found["result_by_token_id"].items()
            },
        }

    def _infgram_prob(self, body: Wire) -> Wire:
        ids = self.ids(body["query"])
        found = self.package.infgram_prob(ids[:-1], ids[-1])
        return self._asked(ids) | _prob(found) | self._suffix(ids[:-1], found["suffix_len"])

    def _infgram_ntd(self, body: Wire) -> Wire:
        ids = self.ids(body["query"])
        found = self.package.infgram_ntd(ids, body["maxSupport"])
        suffix = self._suffix(ids, found["suffix_len"])
        return self._asked(ids) | self._distribution(found) | suffix

    def _suffix(self, prompt: list[int], length: int) -> Wire:
        text = self._words.decode(prompt[-length:]) if length else ""
        return {"suffixLen": length, "longestSuffix": text}

    def _document(self, found: Wire) -> Wire:
        return {
            "documentIndex": found["doc_ix"],
            "documentLength": found["doc_len"],
            "displayLength": found["disp_len"],
            "needleOffset": found["needle_offset"],
            "metadata": orjson.loads(found["metadata"]),
            "tokenIds": found["token_ids"],
            "text": self._words.decode(found["token_ids"]),
            "blocked": False,
        }

    def _get_document_by_rank(self, body: Wire) -> Wire:
        place = (body["shard"], body["rank"])
        window = (body["needleLength"], body["maximumContextLength"])
        return self._document(self.package.get_doc_by_rank_2(*place, *window))

    def _get_document_by_pointer(self, body: Wire) -> Wire:
        place = (body["shard"], body["pointer"])
        window = (body["needleLength"], body["maximumContextLength"])
        return self._document(self.package.get_doc_by_ptr_2(*place, *window))

    def _get_document_by_index(self, body: Wire) -> Wire:
        asked = (body["documentIndex"], body["maximumContextLength"])
        return self._document(self.package.get_doc_by_ix_2(*asked))

    def _get_documents_by_index(self, body: list[Wire]) -> Wire:
        asked = [(one["documentIndex"], one["maximumContextLength"]) for one in body]
        found = self.package.get_docs_by_ixs_2(asked)
        return {"documents": [self._document(one) for one in found]}

    def _documents(self, query: Wire) -> Wire:
        ids = self._words.encode(query["search"])
        found = self.package.find(ids)
        ranks = [
            (shard, rank)
            for shard, (start, end) in enumerate(found["segment_by_shard"])
            for rank in range(start, end)
        ]
        first = query["page"] * query["page_size"]
        window = (len(ids), query["maximum_document_display_length"])
        asked = [(*place, *window) for place in ranks[first : first + query["page_size"]]]
        return {
            "documents": [self._document(one) for one in self.package.get_docs_by_ranks_2(asked)],
            "page": query["page"],
            "pageSize": query["page_size"],
            "pageCount": math.ceil(found["cnt"] / query["page_size"]),
            "totalDocuments": found["cnt"],
        }

    def _attribution(self, body: Wire) -> Wire:
        ids = self._words.encode(body["response"])
        spans = self.package.attribute(
            ids,
            [one for text in body["delimiters"] for one in self._words.encode(text)],
            body["minimumSpanLength"],
            body["maximumFrequency"],
            not body["allowSpansWithPartialWords"],
        )["spans"]
        if body["spanRankingMethod"] == "length":
            spans.sort(key=lambda span: span["length"], reverse=True)
        else:
            spans.sort(key=lambda span: span["unigram_logprob_sum"])
        spans = spans[: math.ceil(len(ids) * body["maximumSpanDensity"])]
        spans.sort(key=lambda span: span["l"])
        return {
            "inputTokens": self._words.pieces(body["response"]),
            "spans": [self._span(span, ids, body) for span in spans],
        }

    def _span(self, span: Wire, ids: list[int], body: Wire) -> Wire:
        places = [(one["s"], one["ptr"]) for one in span["docs"]]
        if len(places) > body["maximumDocumentsPerSpan"]:
            random.seed(42)
            places = random.sample(places, body["maximumDocumentsPerSpan"])
        documents = []
        for place in places:
            whole, long, snippet = (
                self._document(self._around(place, span["length"], most))
                for most in (
                    body["maximumContextLength"],
                    min(body["maximumContextLength"], body["maximumContextLengthLong"]),
                    min(body["maximumContextLength"], body["maximumContextLengthSnippet"]),
                )
            )
            documents.append(
                {
                    **whole,
                    "displayLengthLong": long["displayLength"],
                    "needleOffsetLong": long["needleOffset"],
                    "textLong": long["text"],
                    "displayOffsetSnippet": snippet["displayLength"],
                    "needleOffsetSnippet": snippet["needleOffset"],
                    "textSnippet": snippet["text"],
                }
            )
        return {
            "left": span["l"],
            "right": span["r"],
            "length": span["length"],
            "count": span["count"],
            "unigramLogprobSum": span["unigram_logprob_sum"],
            "text": self._words.decode(ids[span["l"] : span["r"]]),
            "tokenIds": ids[span["l"] : span["r"]],
            "documents": documents,
        }

    def _around(self, place: tuple[int, int], length: int, context: int) -> Wire:
        # Its Python method takes no odd pointer.
        found = self.package.engine.get_doc_by_ptr_2(
            s=place[0], ptr=place[1], needle_len=length, max_ctx_len=context
        )
        names = ("doc_ix", "doc_len", "disp_len", "needle_offset", "metadata", "token_ids")
        return {name: getattr(found, name) for name in names}


def _cut(text: str, offsets: list[tuple[int, int]]) -> list[str]:
    """The text of each token; the first ends where the second begins."""
    pieces = [text[start:end] for start, end in offsets]
    if len(offsets) > 1 and offsets[0][1] > offsets[1][0]:
        pieces[0] = text[offsets[0][0] : offsets[1][0]]
    return pieces


def _prob(found: Wire) -> Wire:
    return {"promptCnt": found["prompt_cnt"], "contCnt": found["cont_cnt"], "prob": found["prob"]}
