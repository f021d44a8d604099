-- Inserts, an index, joins and aggregates; a wrong result violates a constraint, which ends sqlite3 with 1.
CREATE TABLE verdict(right CHECK (right));
CREATE TABLE item(id INTEGER PRIMARY KEY, shelf INTEGER, name TEXT);
BEGIN;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
INSERT INTO item SELECT i, i * 7919 % 1009, printf('item %08d', i * 31 % 20011) FROM n;
COMMIT;
CREATE INDEX by_shelf ON item(shelf);
CREATE TABLE shelf(id INTEGER PRIMARY KEY, items INTEGER, first TEXT);
INSERT INTO shelf SELECT shelf, count(*), min(name) FROM item GROUP BY shelf;
UPDATE item SET name = upper(name) WHERE id % 3 = 0;
DELETE FROM item WHERE id % 10 = 0;
INSERT INTO verdict SELECT count(*) = 1009 AND sum(items) = 20000 FROM shelf;
INSERT INTO verdict SELECT count(*) = 18000 FROM item JOIN shelf ON item.shelf = shelf.id;
INSERT INTO verdict SELECT count(*) = 6000 FROM item WHERE name GLOB 'ITEM *';
.exit 42
