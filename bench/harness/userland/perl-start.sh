exec /bin/bash -c 'for ((i = 0; i < 20; i++)); do /usr/bin/perl -e 1 || exit 1; done; exit 42'
