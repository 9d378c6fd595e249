"""Long texts of models and users are not parsed on the event loop."""

import threading

from app.core.off_loop import MAX_INLINE_CHARACTERS, off_loop


async def test_work_on_a_long_text_runs_in_a_thread() -> None:
    loop = threading.get_ident()
    assert await off_loop(MAX_INLINE_CHARACTERS, threading.get_ident) == loop
    assert await off_loop(MAX_INLINE_CHARACTERS + 1, threading.get_ident) != loop
