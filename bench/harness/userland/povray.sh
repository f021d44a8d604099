# A small picture, by one thread; its channels' sums are what they were when the scene was made, or nearly.
/usr/bin/povray +I/bench/scene.pov +FP8 +O- +W160 +H120 +A0.3 +WT1 -D -GA 2>/dev/null | /usr/bin/python3.11 -I -S /bench/picture.py
