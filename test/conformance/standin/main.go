// Standin replaces programs in images of the conformance suites: nginx, httpd,
// nnp and pause, depending on its name.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// master is the beginning of the name that nginx gives its first process; the
// suite looks for it in the command line of PID 1.
const master = "nginx: master process "

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "standin:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	address := ":80"
	if len(args) > 1 {
		address = args[1]
	}
	if strings.HasPrefix(args[0], master) {
		if err := os.WriteFile("/var/run/nginx.pid", []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
			return err
		}
		return serve(address)
	}
	switch name := filepath.Base(args[0]); name {
	case "nginx":
		// Executed by its path, it keeps the process name, which pidof looks for.
		return syscall.Exec("/bin/nginx", []string{master + "nginx", address}, os.Environ())
	case "httpd":
		fmt.Println("httpd serves", address)
		return serve(address)
	case "nnp":
		fmt.Println("Effective uid:", os.Geteuid())
		return nil
	case "pause":
		signal.Ignore(syscall.SIGCHLD) // the kernel reaps
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
		<-end
		return nil
	default:
		return fmt.Errorf("called %q, which it does not stand in for", name)
	}
}

func serve(address string) error {
	return http.ListenAndServe(address, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "It works!\n")
	}))
}
