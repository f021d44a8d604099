// What a Java machine relies on: faults by design (null pointers, guard pages, safepoints), code that is
// compiled while it runs, threads and locks. Prints a number for each, which any machine must print.

import java.math.BigInteger;
import java.security.MessageDigest;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.*;

public class Selfcheck {
    interface Shape { double area(int n); }
    static final class Square implements Shape { public double area(int n) { return (double) n * n; } }
    static final class Circle implements Shape { public double area(int n) { return n * 3.25; } }
    static final class Line implements Shape { public double area(int n) { return 0.5; } }
    static final class Node { Node next; int value; }

    static long integers() {
        long a = 1;
        int b = 7;
        for (int n = 1; n < 20_000_000; n++) {
            a = a * 6364136223846793005L + n;
            b = Integer.rotateLeft(b, 5) ^ (int) (a >>> 40) + b / n;
        }
        return a ^ b;
    }

    static long floats() {
        double d = 0;
        float f = 1;
        for (int n = 1; n < 5_000_000; n++) {
            d += StrictMath.sqrt(n) / (n + 0.25);
            f = f * 0.999f + n % 17;
        }
        return Double.doubleToLongBits(d) ^ Float.floatToIntBits(f) ^ (long) Double.NaN ^ (long) 1e300;
    }

    // Null checks are page faults once compiled, divisions by zero are #DE.
    static long faults() {
        Node[] nodes = new Node[64];
        for (int n = 0; n < nodes.length; n += 2) nodes[n] = new Node();
        int[] numbers = new int[16];
        long caught = 0;
        for (int n = 0; n < 400_000; n++) {
            try { nodes[n % 64].value += 1; } catch (NullPointerException e) { caught += 1; }
            try { numbers[n % 17] += 100 / (n % 5); }
            catch (ArithmeticException e) { caught += 1000; }
            catch (ArrayIndexOutOfBoundsException e) { caught += 1_000_000; }
        }
        return caught + numbers[3] + nodes[2].value;
    }

    static long dispatch() {
        Shape[] shapes = { new Square(), new Square(), new Circle(), new Line() };
        double total = 0;
        for (int kinds = 2; kinds <= 4; kinds++) {
            for (int n = 0; n < 2_000_000; n++) total += shapes[n % kinds].area(n & 1023);
        }
        return Double.doubleToLongBits(total);
    }

    static int down(int n) { return down(n + 1) + 1; }

    static long overflow() {
        long caught = 0;
        for (int n = 0; n < 20; n++) {
            try { down(0); } catch (StackOverflowError e) { caught++; }
        }
        return caught;
    }

    static long garbage() {
        Map<Integer, byte[]> kept = new HashMap<>();
        long sum = 0;
        for (int n = 0; n < 400_000; n++) {
            byte[] bytes = new byte[64 + n % 512];
            bytes[n % 64] = (byte) n;
            byte[] old = kept.put(n % 10_000, bytes);
            if (old != null) for (byte b : old) sum += b;
        }
        return sum;
    }

    static long threads() throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(4);
        AtomicLong atomic = new AtomicLong();
        long[] locked = new long[1];
        Object lock = new Object();
        List<Future<?>> done = new ArrayList<>();
        for (int t = 0; t < 8; t++) {
            done.add(pool.submit(() -> {
                for (int n = 0; n < 100_000; n++) {
                    atomic.addAndGet(n);
                    synchronized (lock) { locked[0] += n; }
                }
            }));
        }
        for (Future<?> each : done) each.get();
        pool.shutdown();
        return atomic.get() ^ locked[0] << 1;
    }

    static long library() throws Exception {
        MessageDigest sha = MessageDigest.getInstance("SHA-256");
        for (int n = 0; n < 20_000; n++) sha.update(("text " + n).getBytes());
        BigInteger big = BigInteger.valueOf(3).modPow(BigInteger.TWO.pow(2048), BigInteger.ONE.shiftLeft(1279).subtract(BigInteger.ONE));
        int sorted = IntStream.range(0, 500_000).map(n -> n * 1103515245 + 12345).boxed().sorted(Comparator.reverseOrder())
            .limit(1000).mapToInt(n -> n % 1009).sum();
        return Arrays.hashCode(sha.digest()) ^ big.hashCode() ^ sorted;
    }

    public static void main(String[] arguments) throws Exception {
        System.out.println("integers " + integers());
        System.out.println("floats " + floats());
        System.out.println("faults " + faults());
        System.out.println("dispatch " + dispatch());
        System.out.println("overflow " + overflow());
        System.out.println("garbage " + garbage());
        System.out.println("threads " + threads());
        System.out.println("library " + library());
    }
}
