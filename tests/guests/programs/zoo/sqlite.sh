# program: SQLite
# does: its shell: transactions, trees, full text, JSON, windows, a check of the file
# needs: sqlite3
# version: sqlite3 --version
# seconds: 60
sqlite3 a.db <<'C'
pragma journal_mode=wal;
create table t(i integer primary key, a text, b real);
with recursive n(i) as (select 1 union all select i+1 from n where i < 50000) insert into t select i, hex(i*7919 % 10007), i/7.0 from n;
create index ta on t(a);
select count(*), sum(i), round(sum(b), 3), min(a), max(a) from t;
begin; update t set b = b * 2 where i % 3 = 0; rollback;
update t set a = a || 'x' where i % 1000 = 0;
select i, a, rank() over (order by a desc, i) from t limit 3;
create virtual table f using fts5(x);
insert into f select a from t limit 1000;
select count(*) from f where f match '31*';
select json_extract('{"a":[1,2,{"b":3}]}', '$.a[2].b');
pragma integrity_check;
C
sqlite3 a.db .dump | sha256sum
