# program: qemu-aarch64, user mode
# does: translates a program of Go for another processor
# needs: qemu-aarch64-static go
# version: qemu-aarch64-static --version | head -n 1
# seconds: 300
cat > a.go <<'C'
package main
import ("crypto/sha256"; "fmt"; "math"; "sync")
func main() {
    var wait sync.WaitGroup
    sums := make([]string, 4)
    for i := range sums { wait.Add(1); go func() { defer wait.Done()
        sums[i] = fmt.Sprintf("%x", sha256.Sum256(make([]byte, 100000+i)))}() }
    wait.Wait()
    fmt.Println(sums, math.Sqrt(2), math.Sin(1e6))
}
C
export GOCACHE=$PWD/cache GOFLAGS=-mod=mod GO111MODULE=off
GOARCH=arm64 CGO_ENABLED=0 go build -o a a.go && qemu-aarch64-static ./a
