# Linked before and after our own code, which so has pages to itself. A monitor may have to run a whole page of code in a
# slower way because of a single instruction on it (CPUID, on hosts that cannot make it fault); whether that page of
# the C library's also has one of our loops on it would be an accident of layout.
        .text
        .p2align 12
        .section .note.GNU-stack, "", @progbits
