# The shell of the console: runs the workload that is typed, in a folder of its own, and says how it ended. What that writes
# to descriptor 3 are its figures.
here=${0%/*}
stty -echo 2> /dev/null
echo "work: what?"
while read -r name; do
    case $name in
        poweroff) exec systemctl poweroff ;;
        kernel) echo "work: kernel $(dmesg | sed -n 's/^\[ *\([0-9.]*\)\] Run .init as init process/\1/p')"; continue ;;
    esac
    cd "$(mktemp -d)" || exit
    sh -eux "$here/$name.sh" 3> says > log 2>&1 < /dev/null
    status=$?
    [ $status = 0 ] || tail -n 25 log
    echo "work: $name $status $(tr '\n' ' ' < says)"
done
