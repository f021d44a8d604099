exec /usr/bin/sqlite3 -batch -bail :memory: < /bench/sqlite.sql
