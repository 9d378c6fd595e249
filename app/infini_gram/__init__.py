"""infini-gram indexes: n-gram queries over a corpus, and text attributed to its documents.

The engine and the indexer are the package `infini-gram` (https://infini-gram.io/pkg_doc); it is
imported in `engine` alone.
"""
