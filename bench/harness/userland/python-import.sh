exec /usr/bin/python3.11 -I -S -c 'import json, re; raise SystemExit(len(json.dumps([0] * 14)))'
