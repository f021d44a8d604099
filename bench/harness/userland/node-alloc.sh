exec /usr/bin/node /bench/alloc.js
