# pgbench; then the server is killed, and what it finds when it starts again must add up.
as() { runuser -u postgres -- "$@"; }
cluster=postgresql@15-main
systemctl is-active $cluster
chmod 777 .
as createdb bench
as pgbench --quiet --initialize --scale 5 bench
as pgbench --client 4 --time 20 bench > run
cat run
count=$(sed -n 's/^number of transactions actually processed: //p' run)
test "$count" -gt 0
grep -q '^number of failed transactions: 0 ' run
systemctl kill --signal KILL $cluster
while systemctl is-active $cluster; do sleep 1; done
systemctl restart $cluster
until as psql --command 'select 1' bench; do sleep 1; done
sums="select (select count(*) from pgbench_history), a = d and b = d and t = d from
    (select sum(abalance) a from pgbench_accounts) a, (select sum(bbalance) b from pgbench_branches) b,
    (select sum(tbalance) t from pgbench_tellers) t, (select sum(delta) d from pgbench_history) d"
test "$(as psql --no-align --tuples-only --command "$sums" bench)" = "$count|t"
as /usr/lib/postgresql/15/bin/pg_amcheck --install-missing bench
echo "$count transactions, $(sed -n 's/^tps = \([0-9]*\).*/\1 a second/p' run), 0 failed, all there after a kill" >&3
