# program: Chromium, headless, in its sandbox
# does: runs a page's script and prints what it made of the page
# needs: chromium setpriv
# version: chromium --version
# memory: 3G
# seconds: 300
cat > a.html <<'C'
<html><body><p id=x></p><script>
let s = 0; for (let i = 0; i < 1000000; i++) s = (s * 31 + i) % 4294967291;
document.getElementById('x').textContent = 'sum ' + s + ' ' + [3,1,2].sort();
</script></body></html>
C
chmod 777 . ; mkdir -p home; chmod 777 home
as=; [ "$(id -u)" = 0 ] && as="setpriv --reuid=65534 --regid=65534 --clear-groups"
HOME=$PWD/home timeout 250 $as chromium --headless=new --disable-gpu --disable-dev-shm-usage \
    --user-data-dir="$PWD/home/data" --virtual-time-budget=3000 --dump-dom "file://$PWD/a.html" 2> log | grep -o 'sum [0-9][0-9, ]*'
grep -o 'No usable sandbox' log | head -n 1
