exec /bin/bench-go
