"""Roles of the stack's Postgres: random passwords in a private file, and an ordinary role for the pipeline.

Invariant: a new password is stored in the file before it is set in the database, and the file keeps the previous one
until the next change, so that a crash between the two steps never locks us out.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final

import msgspec
import psycopg
from psycopg import sql

from headwater.stack.keys import replace_file

SUPERUSER: Final = "postgres"
PIPELINE: Final = "headwater"
FORMER_DEFAULT: Final = "password"
"""The password of stacks from before passwords were random. Such a database gets a random one at its next start."""

_PASSWORD_BYTES: Final = 24

_TRANSFER_OWNERSHIP: Final = """
SELECT format('ALTER SCHEMA %%I OWNER TO %%I', nspname, %(to)s::text) FROM pg_namespace
 WHERE nspowner = to_regrole(%(from)s::text) AND nspname !~ '^pg_' AND nspname NOT IN ('information_schema', 'public')
UNION ALL
SELECT format('ALTER TABLE %%I.%%I OWNER TO %%I', nspname, relname, %(to)s::text)
  FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
 WHERE relowner = to_regrole(%(from)s::text) AND relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
   AND nspname !~ '^pg_' AND nspname <> 'information_schema'
   -- Sequences follow their table. Objects of an extension keep their owner.
   AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
                   AND (d.deptype = 'e' OR (relkind = 'S' AND d.deptype IN ('a', 'i'))))
UNION ALL
SELECT format('ALTER PUBLICATION %%I OWNER TO %%I', pubname, %(to)s::text) FROM pg_publication
 WHERE pubowner = to_regrole(%(from)s::text) AND NOT puballtables
"""

Connection = psycopg.Connection[tuple[Any, ...]]


class Credentials(msgspec.Struct, frozen=True):
    """The passwords of one data directory."""

    superuser: str
    pipeline: str
    former: str = FORMER_DEFAULT
    """The superuser's password before the last change."""

    def password_of(self, role: str) -> str:
        return self.superuser if role == SUPERUSER else self.pipeline


_credentials: Final = msgspec.json.Decoder(Credentials)


def stored_credentials(file: Path) -> Credentials | None:
    try:
        return _credentials.decode(file.read_bytes())
    except FileNotFoundError:
        return None


def resolve_credentials(file: Path, chosen: str) -> Credentials:
    """Return the passwords for the database. The superuser's is the chosen one, else the stored one, else random."""
    stored = stored_credentials(file)
    if stored is None:
        resolved = Credentials(chosen or _random(), _random())
    elif chosen and chosen != stored.superuser:
        resolved = Credentials(chosen, stored.pipeline, former=stored.superuser)
    else:
        return stored
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(file, msgspec.json.encode(resolved), 0o600)
    return resolved


def set_superuser_password(connection: Connection, password: str) -> None:
    connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(SUPERUSER), password))


def set_up_pipeline_role(connection: Connection, password: str) -> None:
    """Make the pipeline's role the owner of the connected database. When the role is new, tables that the superuser
    created earlier are transferred to it, because only the owner of a table can publish its changes."""
    role = sql.Identifier(PIPELINE)
    is_new = not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [PIPELINE]).fetchone()
    with connection.transaction():
        if is_new:
            connection.execute(sql.SQL("CREATE ROLE {}").format(role))
        connection.execute(
            sql.SQL("ALTER ROLE {} LOGIN REPLICATION NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD {}").format(
                role, password
            )
        )
        database = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, role))
        connection.execute(sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(role))
        if connection.execute("SELECT to_regprocedure('pg_log_standby_snapshot()') IS NOT NULL").fetchone() == (True,):
            # With this function a replication slot's restart point moves at once instead of every 15 s.
            connection.execute(sql.SQL("GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO {}").format(role))
        if is_new:
            for (statement,) in connection.execute(_TRANSFER_OWNERSHIP, {"from": SUPERUSER, "to": PIPELINE}).fetchall():
                connection.execute(statement)


def _random() -> str:
    return secrets.token_urlsafe(_PASSWORD_BYTES)
