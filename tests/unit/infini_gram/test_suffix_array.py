"""Progress of the indexer's steps."""

from pathlib import Path

from app.infini_gram.suffix_array import IndexerSteps


def test_a_step_that_ends_between_two_looks_is_reported(tmp_path: Path) -> None:
    """On a fast machine a step of a small corpus takes a millisecond."""
    log_file = tmp_path / "build.log"
    log_file.write_text("")
    reported: list[tuple[str, float]] = []
    steps = IndexerSteps(
        tmp_path, log_file, 200, lambda step, share, _detail: reported.append((step, share))
    )
    steps.report_progress()
    assert reported == []
    log_file.write_text("Step 2.1 (make-part): Starting ...\nStep 2.2 (merge): Starting ...\n")
    (tmp_path / "merged-0").mkdir()
    (tmp_path / "merged-0" / "0.bin").write_bytes(bytes(50))
    steps.report_progress()
    assert reported == [("suffix array, make-part", 1.0), ("suffix array, merge", 0.25)]
    steps.report_progress()
    assert reported[2:] == [("suffix array, merge", 0.25)]
    log_file.write_text("Step 2.3 (concat): Starting ...\n")
    steps.report_progress()
    assert reported[3:] == [("suffix array, merge", 1.0), ("suffix array, concat", 0.0)]
