"""The row type of results: the columns that every reader of a result selects."""

from app.queue.finish import READ_COLUMNS
from app.results.pages import LIST_COLUMNS
from app.results.rows import ResultRow


def test_the_row_has_the_columns_of_a_read_and_of_a_page() -> None:
    assert set(ResultRow._fields) == set(READ_COLUMNS) == set(LIST_COLUMNS)
