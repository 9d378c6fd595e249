"""team search: whether the results of a team can be searched by words

Revision: 0022
Revises: 0021
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "team_search",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("search", sa.String(), nullable=False),
        sa.CheckConstraint("search IN ('words', 'off')", name=op.f("ck_team_search_search")),
        sa.PrimaryKeyConstraint("team_id", name=op.f("pk_team_search")),
    )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM team_search WHERE search = 'off'",
        "the words of results of teams whose search is off would be indexed.",
    )
    op.drop_table("team_search")
