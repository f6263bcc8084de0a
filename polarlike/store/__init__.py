"""Durable calls, sessions and rollouts: SQLite by default, PostgreSQL by URL.

What holds: an awaited write that returned is on disk, through kill -9 and loss of power. Disk grows with new tokens and
new messages, never with history times turns; a message that a thousand sessions share is stored once.
"""

from polarlike.store.errors import NoRun, StoreError
from polarlike.store.store import SessionRecord, Store

__all__ = ["NoRun", "SessionRecord", "Store", "StoreError"]
