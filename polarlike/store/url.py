"""Database URLs: which the store can use, and how one is shown. Pure.

What holds: what `public` returns has no password, and no sentence raised here repeats a URL that may have one.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import URL
from sqlalchemy.exc import ArgumentError

from polarlike.records import UsageError
from polarlike.store.postgres import DRIVER

_USE = "use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_SECRETS = ("password", "sslpassword")


def parse(url: str) -> URL:
    """Raises UsageError for what is not a URL of a database that the store can use."""
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError) as e:
        said = repr(url) if "@" not in url and "password" not in url else "What was given as the store"
        raise UsageError(f"{said} is not a database URL; {_USE}.") from e
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername=DRIVER)
    if parsed.drivername not in ("sqlite", DRIVER):
        raise UsageError(f"The store cannot use {parsed.drivername}; {_USE}.")
    return parsed


def public(url: URL) -> str:
    """The URL as it may be shown and kept: without its passwords, and without the driver's name."""
    plain = url.difference_update_query(_SECRETS)
    if plain.drivername == DRIVER:
        plain = plain.set(drivername="postgresql")
    return URL.create(
        plain.drivername, plain.username, None, plain.host, plain.port, plain.database, plain.query
    ).render_as_string()
