"""The changes of results, logged by the database itself, and the rules that they must obey."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.stack import Stack

# The service's own log lines have the frames alone, Python's a title above them.
_TRACEBACK = re.compile(r'^(Traceback |  File ")', re.MULTILINE)

# `writer` is the role that the writing process connected as.
LOG_EVERYTHING = (
    """CREATE TABLE history (
         number bigint GENERATED ALWAYS AS IDENTITY, at timestamptz DEFAULT clock_timestamp(),
         writer text DEFAULT session_user, result_id uuid, operation text,
         old_state text, new_state text, old_worker uuid, new_worker uuid,
         old_attempt int, new_attempt int)""",
    """CREATE FUNCTION log_result() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         INSERT INTO history (result_id, operation, old_state, new_state, old_worker, new_worker,
                              old_attempt, new_attempt)
         VALUES (coalesce(NEW.id, OLD.id), TG_OP, OLD.state, NEW.state, OLD.worker_id,
                 NEW.worker_id, OLD.attempt, NEW.attempt);
         RETURN NULL;
       END $$""",
    """CREATE TRIGGER log_result AFTER INSERT OR UPDATE OR DELETE ON results
       FOR EACH ROW EXECUTE FUNCTION log_result()""",
    """CREATE FUNCTION log_chunk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         INSERT INTO history (result_id, operation, old_state, new_state, old_worker, new_worker,
                              old_attempt, new_attempt)
         SELECT r.id, 'APPEND', r.state, r.state, r.worker_id, r.worker_id, r.attempt, NEW.attempt
         FROM results r WHERE r.id = NEW.result_id;
         RETURN NULL;
       END $$""",
    """CREATE TRIGGER log_chunk AFTER INSERT ON result_chunks
       FOR EACH ROW EXECUTE FUNCTION log_chunk()""",
    "CREATE TABLE deaths (number bigint, worker_id uuid)",  # numbered with what else happens
    """CREATE FUNCTION log_death() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         INSERT INTO deaths VALUES (nextval(pg_get_serial_sequence('history', 'number')), NEW.id);
         RETURN NULL;
       END $$""",
    """CREATE TRIGGER log_death AFTER UPDATE ON workers FOR EACH ROW
       WHEN (OLD.dead_at IS NULL AND NEW.dead_at IS NOT NULL) EXECUTE FUNCTION log_death()""",
)

# Each query finds what must not be.
FORBIDDEN = {
    "a change after the terminal state": "SELECT * FROM history WHERE old_state <> 'pending'",
    "a number of terminal transitions that is not one": """
      SELECT r.id, r.state, count(h.number) FROM results r
      LEFT JOIN history h ON h.result_id = r.id AND h.operation = 'UPDATE'
        AND h.old_state = 'pending' AND h.new_state <> 'pending'
      GROUP BY r.id HAVING count(h.number) <> 1""",
    "a claim that did not raise the attempt": """
      SELECT * FROM history WHERE operation = 'UPDATE' AND old_worker IS NULL
        AND new_worker IS NOT NULL AND new_attempt <> old_attempt + 1""",
    "an attempt that changed without a claim": """
      SELECT * FROM history WHERE operation = 'UPDATE' AND old_worker IS NOT NULL
        AND new_attempt <> old_attempt""",
    "a result that went from one worker straight to another": """
      SELECT * FROM history WHERE operation = 'UPDATE' AND old_worker <> new_worker""",
    "text of an attempt that was over": """
      SELECT * FROM history WHERE operation = 'APPEND' AND new_attempt <> old_attempt""",
    # By their order, not `dead_at`: that is when the dying began, and it waits for claims under way.
    "a claim by a worker that was dead": """
      SELECT * FROM history h JOIN deaths d ON d.worker_id = h.new_worker
      WHERE h.old_worker IS NULL AND h.number > d.number""",
    "text that was left behind": "SELECT * FROM result_chunks",
}


async def check_history(stack: "Stack") -> None:
    """Each result had exactly one terminal transition, and no attempt wrote that might not."""
    for what, query in FORBIDDEN.items():
        found = await stack.fetch(query)
        assert not found, f"{what}: {[dict(row) for row in found[:5]]} ({len(found)} in all)"


def check_logs(stack: "Stack") -> None:
    """No process met an error that it did not foresee."""
    for name in stack.parts:
        found = first_traceback(stack.log(name))
        assert not found, f"{name}: {found}"


def first_traceback(log: str) -> str:
    """The text of a log around its first traceback; "" if it has none."""
    found = _TRACEBACK.search(log)
    return log[max(0, found.start() - 300) :][:6000] if found else ""
