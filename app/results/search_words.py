"""The words by which results are found, as SQL: PostgreSQL's parser with an input that takes linear time.

The parser looks ahead for hosts, e-mail addresses, paths and numbers to the end of a run of characters
without a space, and for the end of a comment (`<!--`) to the end of the text, and begins again behind
the next word when it finds none: `a_a_a_` and `<!--<!--` take a time that is quadratic in their length.
So a space cuts a long run behind one of the characters from which it looks ahead, and comments that are
never closed lose their opening. Other texts are not changed: URLs, paths and names of up to
`RUN` characters give the words that they always gave. Runs of letters, digits, `/`, `+` and `=` (base64)
take linear time at any length.
"""

CHARACTERS = 100_000  # of each text are searched
# With so many, no text exceeds the limit of a tsvector (1 MB).
FEW_CHARACTERS = 10_000
RUN = 100
_LONGER = (
    49  # a run is cut behind the last character of its next ones that may be looked ahead from
)

# A word that no text has, each row of a team: with it, one index serves every team.
TEAM_MARK = "\x01"

_LONG_RUNS = rf"\S{{{RUN},{RUN + _LONGER}}}[-_~@.:&<]"


def cut_sql(text: str) -> str:
    """A text whose runs are short. Nearly all texts have no long one, which a search finds in a fifth of the time."""
    return rf"""(
    SELECT CASE WHEN t ~ '\S{{{RUN}}}' THEN regexp_replace(t, '{_LONG_RUNS}', '\& ', 'g') ELSE t END
    FROM (SELECT {text} AS t OFFSET 0) t)"""  # noqa: S608 - of our own expressions


# OFFSET 0: each is computed once, or each use of it would compute it again.
_WITHOUT_OPEN_COMMENTS = """(
    SELECT CASE strpos(cut, '<!--') WHEN 0 THEN cut
      ELSE left(cut, closed) || replace(substr(cut, closed + 1), '<!--', ' ') END
    FROM (
      SELECT cut, CASE strpos(reverse(cut), '>--') WHEN 0 THEN 0
        ELSE length(cut) - strpos(reverse(cut), '>--') + 1 END AS closed
      FROM (SELECT {cut} AS cut OFFSET 0) c
    ) c)"""


def parser_input_sql(text: str, characters: str) -> str:
    """The first characters of a text, as the parser can take them."""
    return _WITHOUT_OPEN_COMMENTS.format(cut=cut_sql(f"left({text}, {characters})"))


def words_sql(text: str, characters: str) -> str:
    return f"to_tsvector('simple', {parser_input_sql(text, characters)})"


def team_words_sql(team: str) -> str:
    return f"array_to_tsvector(ARRAY['{TEAM_MARK}' || encode(convert_to({team}, 'UTF8'), 'hex')])"
