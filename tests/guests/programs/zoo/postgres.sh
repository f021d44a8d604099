# program: PostgreSQL
# does: transactions of several clients, then their sum, an index, a sort on disk
# needs: postgres initdb pgbench psql setpriv
# version: postgres --version
# memory: 1G
# seconds: 300
chmod 755 .
mkdir data && chown 65534:65534 data 2> /dev/null
as=; [ "$(id -u)" = 0 ] && as="setpriv --reuid=65534 --regid=65534 --clear-groups"
export HOME=$PWD/data LC_ALL=C
$as initdb -D data/db -U zoo --no-sync -E UTF8 > log 2>&1 || { cat log; exit 1; }
$as pg_ctl -D data/db -o "-k $PWD/data -c listen_addresses= -c work_mem=64kB -c fsync=off" -l data/log -w start > /dev/null || { cat data/log; exit 1; }
q() { psql -h "$PWD/data" -U zoo -d postgres -Atqc "$1"; }
q "create table t as select i, md5(i::text) as m from generate_series(1, 20000) i; create index on t(m)"
q "select count(*), sum(i), min(m), max(m) from t"
q "select i from t order by m desc limit 3"
q "select m from t where m > 'fff' order by m limit 2"
pgbench -h "$PWD/data" -U zoo -i -q -s 1 postgres > /dev/null 2>&1
pgbench -h "$PWD/data" -U zoo -c 4 -t 50 postgres 2> /dev/null | grep 'transactions actually'
q "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history), count(*) from pgbench_history"
$as pg_ctl -D data/db -m fast stop > /dev/null && echo stopped
