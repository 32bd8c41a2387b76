"""A store in one SQLite file: all that a package has to write to bring a store of its own."""

import errno
import sqlite3
import threading

from kvcore.errors import StoreError
from kvcore.tiers.stores import Store, StoreKey, StoreStat
from kvcore.tiers.stores.contract import Ledger, check_reason, flat_bytes

LARGEST = 1_000_000_000  # bytes of a value, as SQLite is built
TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS frames (namespace, digest, frame, PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bad (namespace, digest, reason, frame, PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
"""


class SqliteStore(Store):
    """Frames in a table. Many processes may share the file."""

    def __init__(self, path):
        self._ledger = Ledger(f"sqlite:{path}")  # the counters, and whether it is closed
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
            self._db.executescript(TABLES)
        except sqlite3.Error as error:
            raise StoreError(
                errno.EIO, f"cannot open {path}: {error}; give the path of a file in a directory"
            ) from error

    @property
    def name(self):
        return self._ledger.name

    def put(self, key, frame):
        name, data = StoreKey.of(key), flat_bytes(frame)  # both refuse what is bad, before anything is written
        if len(data) > LARGEST:
            raise StoreError(errno.EFBIG, f"a frame of {len(data)} bytes; {self.name} takes {LARGEST} at most")
        self._run("INSERT OR REPLACE INTO frames VALUES (?, ?, ?)", name.namespace, name.digest, data)
        self._ledger.add(puts=1, put_bytes=len(data))
        return len(data)

    def get(self, key):
        rows, _ = self._find("SELECT frame FROM frames", key)
        if not rows:
            self._ledger.add(misses=1)
            return None
        self._ledger.add(hits=1, hit_bytes=len(rows[0][0]))
        return memoryview(rows[0][0])  # of bytes that are nobody else's: read-only, and they stay

    def stat(self, key):
        rows, _ = self._find("SELECT length(frame) FROM frames", key)
        return StoreStat(rows[0][0]) if rows else None

    def delete(self, key):
        _, found = self._find("DELETE FROM frames", key)
        self._ledger.add(deletes=found)
        return bool(found)

    def list(self, namespace=None):
        where, values = ("", ()) if namespace is None else (" WHERE namespace = ?", (namespace,))
        rows, _ = self._run(f"SELECT namespace, digest FROM frames{where}", *values)  # noqa: S608 - no text of others
        return (StoreKey(*row) for row in rows)

    def quarantine(self, key, reason):
        check_reason(reason)
        self._find(f"INSERT OR REPLACE INTO bad SELECT namespace, digest, '{reason}', frame FROM frames", key)  # noqa: S608
        _, found = self._find("DELETE FROM frames", key)
        self._ledger.add(quarantined=found)
        return bool(found)

    def stats(self):
        return self._ledger.stats()

    def close(self):
        with self._lock:  # after the call that is under way
            self._ledger.close()
            self._db.close()

    def _find(self, sql, key):
        name = StoreKey.of(key)
        return self._run(f"{sql} WHERE namespace = ? AND digest = ?", name.namespace, name.digest)

    def _run(self, sql, *values):
        with self._lock:
            self._ledger.require_open()
            try:
                cursor = self._db.execute(sql, values)
                return cursor.fetchall(), max(cursor.rowcount, 0)
            except sqlite3.Error as error:
                full = "full" in str(error)
                advice = "free some space" if full else "the store is as it was before"
                raise StoreError(errno.ENOSPC if full else errno.EIO, f"{self.name}: {error}; {advice}") from error


def open_sqlite(rest):
    """Open what a URI says after its scheme: ``sqlite:PATH``."""
    return SqliteStore(rest)
