# program: SBCL
# does: compiles Lisp, catches a fault of memory by a signal, eight gigabytes of addresses
# needs: sbcl
# version: sbcl --version
# memory: 1G
# seconds: 100
sbcl --noinform --dynamic-space-size 8192 --non-interactive --no-userinit --eval '(progn
 (defun fib (n) (declare (fixnum n)) (if (< n 2) n (+ (fib (- n 1)) (fib (- n 2)))))
 (format t "~a ~a ~a~%" (fib 27) (mod (expt 3 5000) 1000000007) (length (loop for i below 300000 collect (list i))))
 (gc :full t)
 (handler-case (sb-sys:sap-ref-8 (sb-sys:int-sap 16) 0) (sb-sys:memory-fault-error () (format t "fault~%"))))'
