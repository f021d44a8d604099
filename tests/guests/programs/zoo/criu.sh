# program: CRIU
# does: stops a program and keeps it in files, which neither kernel here lets it do
# needs: criu setsid
# version: criu --version | head -n 1
# seconds: 120
cat > count.sh <<'C'
i=0
while :; do i=$((i + 1)); echo $i > count; sleep 0.05; done
C
setsid sh count.sh < /dev/null > /dev/null 2>&1 &
pid=$!
sleep 1
mkdir images
criu dump -t $pid -D images --shell-job -v0 > log 2>&1
status=$?
echo "dump $status"
if [ $status = 0 ]; then
    before=$(cat count)
    criu restore -d -D images --shell-job -v0 > log 2>&1
    echo "restore $?"
    sleep 1
    [ "$(cat count)" -gt "$before" ] && echo "goes on"
fi
kill -9 $pid 2> /dev/null
