# program: Go's race detector
# does: finds a race, and none where there is a lock
# needs: go gcc
# version: go version
# seconds: 400
export GOCACHE=$PWD/cache GO111MODULE=off CGO_ENABLED=1
for lock in "" "lock.Lock(); defer lock.Unlock();"; do
cat > a.go <<C
package main
import ("fmt"; "sync")
func main() {
    var wait sync.WaitGroup
    var lock sync.Mutex
    _ = &lock
    count := 0
    for i := 0; i < 8; i++ { wait.Add(1); go func() { defer wait.Done(); $lock count++ }() }
    wait.Wait()
    fmt.Println(count > 0)
}
C
go build -race -o a a.go || exit 1
./a > out 2> log
echo "status $?"
cat out
grep -c 'WARNING: DATA RACE' log | sed 's/^[1-9].*/a race/'
done
