exec /usr/bin/python3.11 -I -S -c 'raise SystemExit(42)'
