exec /usr/bin/python3.11 -I -S /bench/python.py
