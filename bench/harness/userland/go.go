// Goroutines, channels, maps, allocation and floating point; exits with 42 if the results are right.
package main

import (
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
)

type node struct{ left, right *node }

func grow(depth int) *node {
	if depth == 0 {
		return &node{}
	}
	return &node{grow(depth - 1), grow(depth - 1)}
}

func (n *node) count() int {
	if n.left == nil {
		return 1
	}
	return 1 + n.left.count() + n.right.count()
}

// Numbers go through a chain of goroutines, each of which lets pass what its own prime does not divide.
func primes(limit int) (sum int) {
	source := make(chan int)
	go func(to chan int) {
		for i := 2; i < limit; i++ {
			to <- i
		}
		close(to)
	}(source)
	for prime, more := <-source; more; prime, more = <-source {
		sum += prime
		next := make(chan int)
		go func(from, to chan int, prime int) {
			for i := range from {
				if i%prime != 0 {
					to <- i
				}
			}
			close(to)
		}(source, next, prime)
		source = next
	}
	return sum
}

func words(count int) (int, int) {
	counts, state := map[string]int{}, uint32(12345)
	for i := 0; i < count; i++ {
		state = state*1103515245 + 12345
		counts["w"+strconv.Itoa(int(state>>16)%997)]++
	}
	keys, total := []string{}, 0
	for key, n := range counts {
		keys = append(keys, key)
		total += n
	}
	sort.Strings(keys)
	return len(strings.Split(strings.Join(keys, " "), " ")), total
}

func multiply(size int) float64 {
	a, b, trace := make([]float64, size*size), make([]float64, size*size), 0.0
	for i := range a {
		a[i], b[i] = float64(i%7), float64(i%5)
	}
	for i := 0; i < size; i++ {
		for k := 0; k < size; k++ {
			trace += a[i*size+k] * b[k*size+i]
		}
	}
	return trace
}

func main() {
	var wait sync.WaitGroup
	trees := make([]int, 8)
	for i := range trees {
		wait.Add(1)
		go func(i int) {
			defer wait.Done()
			trees[i] = grow(13).count()
		}(i)
	}
	wait.Wait()
	right := true
	for _, count := range trees {
		right = right && count == 1<<14-1
	}
	different, total := words(100000)
	right = right && primes(2000) == 277050 && different == 997 && total == 100000
	right = right && multiply(300) == expectedTrace(300)
	if right {
		os.Exit(42)
	}
	os.Exit(1)
}

// The same sum in integers.
func expectedTrace(size int) float64 {
	sum := 0
	for i := 0; i < size; i++ {
		for k := 0; k < size; k++ {
			sum += (i*size + k) % 7 * ((k*size + i) % 5)
		}
	}
	return float64(sum)
}
