"""A database's errors as one sentence each that says what to do. Knows the words of SQLite, libpq and PostgreSQL."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from polarlike.records import PolarError


class StoreError(PolarError):
    """The store could not read or write. What was not acknowledged is not on disk, or (where a database server went
    away while it committed) is there without having been acknowledged."""


class NoRun(StoreError):
    """A store that is only to be read does not exist."""

    @classmethod
    def at(cls, where: str) -> NoRun:
        return cls(f"There is no run in the store {where}; check where it was recorded.")


# Found in the error's text, in this order: {0} is the store. PostgreSQL's come in English from libpq and in the
# server's language from the server, so the latter are told by their SQLSTATE where they have one.
_SAID: list[tuple[tuple[str, ...], str]] = [
    (("is full", "No space left", "53100"), "The disk that holds the store {0} is full; free space and go on"),
    (("readonly", "read-only", "25006"), "The store {0} cannot be written; check its permissions"),
    (("locked", "55P03"), "Another process has held the store {0} for too long; end it and go on"),
    (
        ("unable to open", "disk I/O error"),
        "The store {0} cannot be opened; check its path and permissions, or copy its folder to a disk that can be "
        "written",
    ),
    (("malformed", "not a database"), "The store {0} is damaged or not a store; restore it or use another file"),
    (
        ("authentication failed", "no password supplied", "28P01", "28000"),
        "The database server does not let us in to {0}; check the user, and give the password as PGPASSWORD or in "
        "~/.pgpass",
    ),
    (("3D000", "FATAL:  database"), "The store {0} has no such database; make it with createdb, or check the URL"),
    (("42501",), "The user of {0} may not do that; grant it CREATE on the database"),
    (("53300",), "The database server of {0} takes no more connections; end some, or raise its max_connections"),
    (
        ("connection failed", "connection timeout", "could not translate host", "Name or service", "getaddrinfo"),
        "The database server of {0} cannot be reached; start it, or check the URL",
    ),
    (
        ("server closed", "connection is lost", "connection is closed", "57P", "SSL connection", "Connection reset"),
        "The database server of {0} went away; start it again, and the same command goes on",
    ),
]


def sentence(error: DBAPIError, where: str) -> str:
    """What a database error means, for the user."""
    text = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
    code = getattr(error.orig, "sqlstate", None) or ""
    for words, said in _SAID:
        if any(code.startswith(w) if _is_code(w) else w in text for w in words):
            return f"{said.format(where)} ({text})."
    return f"The store {where} failed: {text}; check the disk or the database server."


def _is_code(word: str) -> bool:
    return word[0].isdigit() and word.isalnum()
