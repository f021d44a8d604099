# program: Python
# short
# does: threads, processes, big numbers, memory maps, signals, decimal arithmetic
# needs: python3
# version: python3 --version
# seconds: 100
cat > a.py <<'C'
import decimal, hashlib, mmap, multiprocessing, os, signal, threading
def work(n):
    s = 0
    for i in range(60000): s = (s * 31 + i * n) % 4294967291
    return s
if __name__ == "__main__":
    with multiprocessing.Pool(3) as pool: print(pool.map(work, range(6)))
    out = [0] * 4
    threads = [threading.Thread(target=lambda i=i: out.__setitem__(i, work(i))) for i in range(4)]
    [t.start() for t in threads]; [t.join() for t in threads]; print(out)
    m = mmap.mmap(-1, 1 << 24); m[12345:12350] = b"hello"; print(hashlib.sha256(m).hexdigest())
    decimal.getcontext().prec = 60; print(decimal.Decimal(2).sqrt(), pow(3, 10**5, 10**40))
    signal.signal(signal.SIGALRM, lambda *a: print("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()
C
python3 a.py
