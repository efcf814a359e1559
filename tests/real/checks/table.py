"""The rows of the report, and the time there is for them.

A row is written as soon as it is known, with a key by which tests/real/run sorts it, so that whatever ends in the
middle leaves what was seen so far.
"""

import os
import threading
import time
import traceback

OK, FAILED, INFO = "ok", "FAILED", "information"


class Skip(Exception):
    """Why a check cannot run on this host."""


class Wrong(Exception):
    """Something else was seen than expected."""


class Clock:
    def __init__(self, limit):
        self.end = time.monotonic() + limit

    def left(self):
        return self.end - time.monotonic()


class Table:
    def __init__(self, path, clock):
        self.path, self.clock = path, clock
        self.lock = threading.Lock()

    def write(self, key, cells):
        clean = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
        with self.lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(key + "\t| " + " | ".join(clean) + " |\n")
            file.flush()
            os.fsync(file.fileno())


class Rows:
    """Rows with the same place in the table, engine and framework."""

    def __init__(self, table, group, job=0, engine="", framework=""):
        self.table, self.group, self.job = table, group, job
        self.engine, self.framework = engine, framework
        self.count = 0

    def add(self, check, expected, seen, state):
        key = f"{self.group:02d}.{self.job:03d}.{self.count:03d}"
        self.count += 1
        self.table.write(key, [check, self.engine, self.framework, expected, seen, state])

    def hold(self, check, expected, seen, right):
        self.add(check, expected, seen, OK if right else FAILED)

    def skip(self, check, why):
        self.add(check, "", "", f"skipped ({why})")

    def ask(self, check, expected, look, needs=5):
        """Adds a row. `look` returns what was seen and whether it is right. Returns that, or None if the check was skipped."""
        if self.table.clock.left() < needs:
            return self.skip(check, "time")
        try:
            seen, right = look()
        except Skip as why:
            return self.skip(check, why)
        except Wrong as wrong:
            seen, right = str(wrong)[-400:], False
        except Exception as error:
            traceback.print_exc()
            seen, right = f"the check broke: {type(error).__name__}: {error}", False
        self.hold(check, expected, seen, right)
        return right
