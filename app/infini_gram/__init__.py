"""infini-gram indexes: n-gram queries over a corpus, and attribution of text to its documents.

The engine and the indexer are the package `infini-gram` (https://infini-gram.io/pkg_doc); only
`engine` imports it.
"""
