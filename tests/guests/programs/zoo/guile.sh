# program: Guile
# does: compiles Scheme to the processor's code
# needs: guile
# version: guile --version | head -n 1
# seconds: 100
export HOME=$PWD GUILE_AUTO_COMPILE=0
cat > a.scm <<'C'
(define (fib n) (if (< n 2) n (+ (fib (- n 1)) (fib (- n 2)))))
(display (fib 24)) (newline)
(display (call/cc (lambda (k) (for-each (lambda (x) (if (> x 3) (k x))) '(1 2 3 4 5)) 0))) (newline)
(display (modulo (expt 3 3000) 1000000007)) (newline)
C
guile a.scm
