# program: strace
# short
# does: shows a program's calls, follows its children, changes a call's result
# needs: strace
# version: strace --version | head -n 1
# seconds: 60

# A file for each process: in one file a call is two lines if another process made one meanwhile.
strace -ff -qq -o log -e trace=write,exit_group -e signal=none sh -c 'echo one; (echo two); echo three | cat'
sed 's/  */ /g' log.* | sort
strace -o log -qq -e trace=getpgid -e inject=getpgid:retval=4242 perl -e 'print getpgrp(0), "\n"'
