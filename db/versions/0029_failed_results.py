"""failed results: indexes by model and by retryable, each with the columns of the other filters

Older processes use those that there were, and write all of them.

Revision: 0029
Revises: 0028
"""

import sqlalchemy as sa

from app.core import schema_changes

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_FAILED = sa.text("state = 'failed'")
_HAS_CODE = sa.text("error_code IS NOT NULL")
_HAS_RETRYABLE = sa.text("error_retryable IS NOT NULL")
_ALL = "ix_results_team_id_id_failed"
_BY_CODE = "ix_results_team_id_error_code_id"
_BY_RETRYABLE = "ix_results_team_id_error_retryable_id"
_BY_MODEL = "ix_results_model_name_team_id_id_failed"


def upgrade() -> None:
    with schema_changes.outside_transactions():
        schema_changes.replace_index(
            _ALL, "results", ["team_id", "id"], _FAILED, include=["context_id"]
        )
        schema_changes.replace_index(
            _BY_CODE,
            "results",
            ["team_id", "error_code", "id"],
            _HAS_CODE,
            include=["context_id", "model_name", "error_retryable"],
        )
        schema_changes.create_index(
            _BY_RETRYABLE,
            "results",
            ["team_id", "error_retryable", "id"],
            _HAS_RETRYABLE,
            include=["context_id", "model_name", "error_code"],
        )
        schema_changes.create_index(
            _BY_MODEL,
            "results",
            ["model_name", "team_id", "id"],
            _FAILED,
            include=["context_id", "error_code", "error_retryable"],
        )


def downgrade() -> None:
    with schema_changes.outside_transactions():
        schema_changes.drop_index(_BY_MODEL, "results")
        schema_changes.drop_index(_BY_RETRYABLE, "results")
        schema_changes.replace_index(
            _BY_CODE, "results", ["team_id", "error_code", "id"], _HAS_CODE
        )
        schema_changes.replace_index(_ALL, "results", ["team_id", "id"], _FAILED)
