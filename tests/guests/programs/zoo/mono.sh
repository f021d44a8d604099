# program: Mono
# does: compiles C#, collects, throws across frames, threads
# needs: mono mcs
# version: mono --version | head -n 1
# memory: 1G
# seconds: 200
cat > a.cs <<'C'
using System; using System.Collections.Generic; using System.Linq; using System.Threading;
class A {
    static int Deep(int n) { if (n == 0) throw new InvalidOperationException("deep"); return Deep(n - 1) + 1; }
    static void Main() {
        long s = 0; for (int i = 0; i < 3000000; i++) s = (s * 31 + i) % 4294967291;
        var kept = new List<byte[]>(); for (int i = 0; i < 100000; i++) { kept.Add(new byte[100]); if (kept.Count > 5000) kept.Clear(); }
        Console.WriteLine(s + " " + kept.Count);
        try { Deep(200); } catch (InvalidOperationException e) { Console.WriteLine(e.Message); }
        try { object o = null; o.ToString(); } catch (NullReferenceException) { Console.WriteLine("null"); }
        var t = Enumerable.Range(0, 4).Select(n => new Thread(() => Interlocked.Add(ref sum, n))).ToList(); t.ForEach(x => x.Start()); t.ForEach(x => x.Join());
        Console.WriteLine(sum + " " + Math.Sin(1e5).ToString("R"));
    }
    static long sum;
}
C
mcs a.cs && mono a.exe
