"""URLs of databases: what they become, and that no password is ever shown."""

import pytest
import sqlalchemy as sa

from polarlike.records import UsageError
from polarlike.store.errors import sentence
from polarlike.store.url import parse, public


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("sqlite:////runs/a/store.db", "sqlite:////runs/a/store.db"),
        ("postgresql://ann:s3cret@db:5433/runs", "postgresql://ann@db:5433/runs"),
        ("postgres://ann:s3cret@db/runs", "postgresql://ann@db/runs"),
        ("postgresql+psycopg://ann:s3cret@db/runs?sslmode=require", "postgresql://ann@db/runs?sslmode=require"),
        ("postgresql://ann@db/runs?password=s3cret&sslpassword=s3cret", "postgresql://ann@db/runs"),
        ("postgresql://ann:s3cret%40x@/runs?host=/var/run", "postgresql://ann@/runs?host=%2Fvar%2Frun"),
    ],
)
def test_a_url_is_shown_without_its_passwords(given: str, shown: str) -> None:
    assert public(parse(given)) == shown
    assert public(parse(shown)) == shown


def test_postgresql_is_spoken_to_by_psycopg_with_the_password_given() -> None:
    parsed = parse("postgresql://ann:s3cret@db/runs")
    assert (parsed.drivername, parsed.password) == ("postgresql+psycopg", "s3cret")


@pytest.mark.parametrize(
    "url",
    ["postgresql://ann:s3cret@db:port/runs", "ann:s3cret@db", "mysql://ann:s3cret@db/x", "host=db password=s3cret"],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(UsageError) as e:
        parse(url)
    assert "use sqlite:///FILE or postgresql://" in str(e.value)
    assert "s3cret" not in str(e.value)


class DriverError(Exception):
    def __init__(self, text: str, sqlstate: str | None = None):
        super().__init__(text)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (DriverError("database or disk is full"), "disk that holds the store X is full"),
        (DriverError("Datei kann nicht erweitert werden", "53100"), "disk that holds the store X is full"),
        (DriverError("could not write to file: No space left on device"), "disk that holds the store X is full"),
        (DriverError("cannot execute INSERT in a read-only transaction", "25006"), "cannot be written"),
        (DriverError("sorry, too many clients already", "53300"), "takes no more connections"),
        (DriverError("terminating connection due to administrator command", "57P01"), "went away"),
        (
            DriverError("consuming input failed: server closed the connection unexpectedly\n\tThis probably"),
            "went away",
        ),
        (DriverError("something else"), "The store X failed: something else"),
        (DriverError(""), "The store X failed: DriverError"),
    ],
    ids=str,
)
def test_an_error_of_a_database_is_one_sentence_that_says_what_to_do(error: DriverError, says: str) -> None:
    said = sentence(sa.exc.OperationalError("insert", {}, error), "X")
    assert says in said and "\n" not in said
