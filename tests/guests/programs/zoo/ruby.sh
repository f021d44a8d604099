# program: Ruby
# does: fibers, threads, big numbers, expressions, its compiler
# needs: ruby
# version: ruby --version
# seconds: 100
cat > a.rb <<'C'
f = Fiber.new { 3.times { |i| Fiber.yield i * i }; :end }
p 4.times.map { f.resume }
p 4.times.map { |t| Thread.new { (1..50000).reduce { |a, b| (a * 31 + b) % 4294967291 } } }.map(&:value)
p (2**4000 + 1).digits.sum, "abcabd".scan(/ab./), [3, 1, 2].sort, GC.start
r, w = IO.pipe; pid = fork { w.puts "child"; exit! 3 }; Process.wait pid; p r.gets, $?.exitstatus
C
ruby a.rb
