"""log probabilities of prompts

A column that may be NULL: older processes neither write nor read it.

Revision: 0025
Revises: 0024
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema_changes.lock_tables("results")
    op.add_column("results", sa.Column("prompt_logprobs", sa.Text(), nullable=True))


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE prompt_logprobs IS NOT NULL",
        "log probabilities of prompts would be deleted.",
    )
    schema_changes.lock_tables("results")
    op.drop_column("results", "prompt_logprobs")
