# The guest of a power cut: says what it finds of earlier rounds, then writes until it is killed. What it
# says to have done ("done f 7") has been flushed to the disk by fsync before.
dmesg -n 1 # whole lines on the console
mount -t ext4 /dev/vda /mnt && mount -t devtmpfs dev /mnt/dev && cd /mnt || exit
mkdir -p load
database() { chroot /mnt /usr/bin/sqlite3 -batch /load/db "$@" 2>&1; }
database 'create table if not exists t (i integer primary key, x blob)'

# Files are numbered from 1 and hold their numbers; each came to be by a rename.
files=0
number=0
while [ "$number" = "$files" ] && read -r number 2>/dev/null < load/$((files + 1)); do
    files=$((files + 1))
done
echo "found f $files of $(ls load | grep -c '^[0-9]*$')"
rows=$(database 'select coalesce(max(i), 0) from t')
echo "found s $rows of $(database 'select count(*) from t where length(x) = 2000')"
dmesg | grep 'EXT4-fs error'
echo "integrity $(database 'pragma integrity_check')"
[ -e /only-look ] && { cd /; umount /mnt/dev /mnt; exit; }

write_files() {
    while true; do
        files=$((files + 1))
        echo $files > load/new && sync load/new && mv load/new load/$files && sync load || exit
        echo "done f $files"
    done
}
statements() {
    echo 'pragma synchronous = extra;'
    while true; do
        rows=$((rows + 1))
        echo "insert into t values ($rows, randomblob(2000)); select 'done s $rows';"
    done
}
write_files &
statements | database
