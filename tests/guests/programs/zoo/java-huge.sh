# program: OpenJDK with a heap of two terabytes
# does: reserves 32 TB of addresses
# needs: java javac
# version: java -version 2>&1 | head -n 1
# memory: 3G
# seconds: 200
cat > A.java <<'C'
public class A {
    public static void main(String[] a) {
        long sum = 0;
        for (int i = 0; i < 200000; i++) { int[] b = new int[1000]; b[i % 1000] = i; sum += b[i % 1000]; }
        System.out.println(sum + " " + (Runtime.getRuntime().maxMemory() >> 40));
    }
}
C
javac A.java
java -XX:+UseZGC -Xmx2t -Xms64m -XX:SoftMaxHeapSize=256m A | grep -v warning
java -XX:+UseG1GC -Xmx2t -Xms64m -XX:G1HeapRegionSize=32m A
