# program: OpenJDK with ZGC
# does: collects while threads allocate, in 16 times its heap of addresses
# needs: java javac
# version: java -version 2>&1 | head -n 1
# memory: 3G
# seconds: 200
cat > A.java <<'C'
import java.util.*;
public class A {
    public static void main(String[] a) throws Exception {
        Thread[] threads = new Thread[4];
        long[] sums = new long[4];
        for (int t = 0; t < 4; t++) { final int n = t; threads[t] = new Thread(() -> {
            Map<Integer, byte[]> kept = new HashMap<>();
            for (int i = 0; i < 60000; i++) { byte[] b = new byte[1000]; b[i % 1000] = (byte) i; kept.put(i % 5000, b); }
            for (byte[] b : kept.values()) for (byte x : b) sums[n] += x; }); threads[t].start(); }
        for (Thread t : threads) t.join();
        System.out.println(Arrays.toString(sums));
    }
}
C
javac A.java && java -XX:+UseZGC -Xmx512m -Xlog:gc+init=off A
