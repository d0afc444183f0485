"""Tables of the ledger's SQLite file, and how an older file becomes a newer one. SQL only.

Rules
- ``reservations`` and ``settlements`` have one row per request each; ``open`` those that are not settled. No content.
- ``usage`` and ``devices`` are sums per day of the same, for reports; ``accounts`` is what is left of each rate.
- The writer inserts into the view ``journal`` only: [kind, …] as a JSON array. Triggers do the rest, so that a whole
  batch is one statement. Python's sqlite3 gives up the interpreter's lock around each statement, and beside a busy
  event loop it takes milliseconds to get it back: a statement per row would be a hundred times slower.
- What is settled is settled: a second settlement changes nothing, except one that comes after the lease ran out.
- ``MIGRATIONS[n]`` makes version n + 1 of version n. A released one is never edited.
"""

from __future__ import annotations

APPLICATION_ID = 0x464F5245  # "FORE"

_V1 = """
CREATE TABLE reservations (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, at REAL NOT NULL, lease REAL NOT NULL,
    organisation TEXT NOT NULL, tenant TEXT NOT NULL, user TEXT NOT NULL, key TEXT NOT NULL,
    model TEXT NOT NULL, class TEXT NOT NULL, cost_centre TEXT NOT NULL,
    prompt INTEGER NOT NULL, output INTEGER NOT NULL, cost INTEGER NOT NULL,
    device_ns INTEGER NOT NULL DEFAULT 0, recompute_ns INTEGER NOT NULL DEFAULT 0, retry_ns INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE open (id TEXT PRIMARY KEY, seq INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE settlements (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, outcome TEXT NOT NULL CHECK (outcome IN ('ran', 'nothing', 'expired')),
    prompt INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL, cost INTEGER NOT NULL
) STRICT;
CREATE TABLE usage (
    day TEXT NOT NULL, tenant TEXT NOT NULL, user TEXT NOT NULL, model TEXT NOT NULL, class TEXT NOT NULL,
    organisation TEXT NOT NULL, cost_centre TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL,
    cost INTEGER NOT NULL, device_ns INTEGER NOT NULL, recompute_ns INTEGER NOT NULL, retry_ns INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, user, model, class, organisation, cost_centre)
) STRICT, WITHOUT ROWID;
CREATE TABLE devices (
    day TEXT NOT NULL, model TEXT NOT NULL, worker TEXT NOT NULL, kind TEXT NOT NULL, ns INTEGER NOT NULL,
    PRIMARY KEY (day, model, worker, kind)
) STRICT, WITHOUT ROWID;
CREATE TABLE accounts (
    level TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, at REAL NOT NULL, rates TEXT NOT NULL,
    PRIMARY KEY (level, tenant, name)
) STRICT, WITHOUT ROWID;

CREATE VIEW journal AS SELECT '' AS kind, '' AS id, '' AS body;

-- id, at, lease, organisation, tenant, user, key, model, class, cost_centre, prompt, output, cost
CREATE TRIGGER reserved INSTEAD OF INSERT ON journal WHEN NEW.kind = 'reserved' BEGIN
    INSERT OR IGNORE INTO reservations
        (id, at, lease, organisation, tenant, user, key, model, class, cost_centre, prompt, output, cost)
    VALUES (
        NEW.id, NEW.body ->> 2, NEW.body ->> 3, NEW.body ->> 4, NEW.body ->> 5, NEW.body ->> 6, NEW.body ->> 7,
        NEW.body ->> 8, NEW.body ->> 9, NEW.body ->> 10, NEW.body ->> 11, NEW.body ->> 12, NEW.body ->> 13);
    INSERT OR IGNORE INTO open SELECT id, seq FROM reservations WHERE changes() AND id = NEW.id;
END;

-- id, at, outcome, prompt, cached, output, cost
CREATE TRIGGER settled INSTEAD OF INSERT ON journal WHEN NEW.kind = 'settled' BEGIN
    INSERT OR IGNORE INTO open
        SELECT r.id, r.seq FROM reservations r JOIN settlements s USING (seq)
        WHERE r.id = NEW.id AND s.outcome = 'expired';
    DELETE FROM settlements WHERE seq IN (SELECT seq FROM open WHERE id = NEW.id);
    INSERT INTO settlements
        SELECT seq, NEW.body ->> 2, NEW.body ->> 3, NEW.body ->> 4, NEW.body ->> 5, NEW.body ->> 6, NEW.body ->> 7
        FROM open WHERE id = NEW.id;
    INSERT INTO usage
        SELECT date(r.at, 'unixepoch'), r.tenant, r.user, r.model, r.class, r.organisation, r.cost_centre,
               s.outcome = 'ran', s.prompt, s.cached, s.output, s.cost, 0, 0, 0
        FROM open o JOIN reservations r USING (seq) JOIN settlements s USING (seq) WHERE o.id = NEW.id
        ON CONFLICT DO UPDATE SET
            requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
            cached = cached + excluded.cached, output = output + excluded.output, cost = cost + excluded.cost;
    DELETE FROM open WHERE id = NEW.id;
END;

-- id, at
CREATE TRIGGER expired INSTEAD OF INSERT ON journal WHEN NEW.kind = 'expired' BEGIN
    INSERT INTO settlements SELECT seq, NEW.body ->> 2, 'expired', 0, 0, 0, 0 FROM open WHERE id = NEW.id;
    DELETE FROM open WHERE id = NEW.id;
END;

-- id, device_ns, recompute_ns, retry_ns; before or after its settlement
CREATE TRIGGER ran_for INSTEAD OF INSERT ON journal WHEN NEW.kind = 'ran_for' BEGIN
    UPDATE reservations SET
        device_ns = device_ns + (NEW.body ->> 2), recompute_ns = recompute_ns + (NEW.body ->> 3),
        retry_ns = retry_ns + (NEW.body ->> 4)
    WHERE id = NEW.id;
    INSERT INTO usage
        SELECT date(at, 'unixepoch'), tenant, user, model, class, organisation, cost_centre,
               0, 0, 0, 0, 0, NEW.body ->> 2, NEW.body ->> 3, NEW.body ->> 4
        FROM reservations WHERE id = NEW.id
        ON CONFLICT DO UPDATE SET
            device_ns = device_ns + excluded.device_ns, recompute_ns = recompute_ns + excluded.recompute_ns,
            retry_ns = retry_ns + excluded.retry_ns;
END;

-- level, tenant, name, at, {rate: [capacity, level]}
CREATE TRIGGER account INSTEAD OF INSERT ON journal WHEN NEW.kind = 'account' BEGIN
    INSERT INTO accounts VALUES (NEW.body ->> 1, NEW.body ->> 2, NEW.body ->> 3, NEW.body ->> 4, NEW.body -> 5)
        ON CONFLICT DO UPDATE SET at = excluded.at, rates = excluded.rates;
END;

-- day, model, worker, kind, ns
CREATE TRIGGER device INSTEAD OF INSERT ON journal WHEN NEW.kind = 'device' BEGIN
    INSERT INTO devices VALUES (NEW.body ->> 1, NEW.body ->> 2, NEW.body ->> 3, NEW.body ->> 4, NEW.body ->> 5)
        ON CONFLICT DO UPDATE SET ns = ns + excluded.ns;
END;
"""

MIGRATIONS = (_V1,)
VERSION = len(MIGRATIONS)
BATCH = "INSERT INTO journal (kind, id, body) SELECT value ->> 0, value ->> 1, value FROM json_each(?)"
"""Writes a JSON array of journal rows: one statement, all of it or nothing."""
OLDEST_SQLITE = (3, 38, 0)
