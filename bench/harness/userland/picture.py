"""Whether a PPM on standard input is the picture of scene.pov: size, and sums of channels by quarters of its height."""
import sys

EXPECTED = (924426, 961140, 1030056, 819488, 861579, 780247, 716375, 712473, 799537, 781879, 807402, 830855)

data = sys.stdin.buffer.read()
while b"\n#" in data[:400]:
    before, comment = data.split(b"\n#", 1)
    data = before + b"\n" + comment.split(b"\n", 1)[1]
header, body = data[:15], data[15:]
if header != b"P6\n160 120\n255\n" or len(body) != 160 * 120 * 3:
    raise SystemExit("not a picture of 160 by 120: %r" % header)
quarter = len(body) // 4
parts = [body[i * quarter:(i + 1) * quarter] for i in range(4)]
sums = [sum(part[channel::3]) for part in parts for channel in range(3)]
if len(sums) != len(EXPECTED) or any(abs(found - known) > known // 1000 for found, known in zip(sums, EXPECTED)):
    raise SystemExit("another picture: %r" % sums)
raise SystemExit(42)
