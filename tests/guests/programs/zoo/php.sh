# program: PHP with its compiler
# does: sorts, hashes, expressions, the JIT on and off
# needs: php
# version: php --version | head -n 1
# seconds: 60
cat > a.php <<'C'
<?php
$s = 0; for ($i = 0; $i < 2000000; $i++) $s = ($s * 31 + $i) % 4294967291;
$a = []; for ($i = 0; $i < 50000; $i++) $a[] = md5((string)$i); sort($a);
echo $s, " ", $a[0], " ", hash('sha256', implode('', $a)), " ", preg_match_all('/a(b|c)+/', implode('', $a)), "\n";
C
php a.php
php -d opcache.enable_cli=1 -d opcache.jit=1255 -d opcache.jit_buffer_size=32M a.php
