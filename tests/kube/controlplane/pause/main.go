// The first process of a pod: holds its namespaces, reaps its orphans, and goes when told.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	told := make(chan os.Signal, 8)
	signal.Notify(told, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for got := range told {
		if got != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}
