exec /bin/bash -c 'for ((i = 0; i < 100; i++)); do (:) || exit 1; done; exit 42'
