"""Reranking and scores (Cohere, Jina, vLLM, TEI), and TEI's embeddings."""
