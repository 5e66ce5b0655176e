package main

import (
	"fmt"
	"io"
	"net"
	"strconv"
)

// tcp serves in the background: the next step follows as soon as it listens.
func tcp(args []string) error {
	if len(args) < 2 {
		return errUsage
	}
	var n int64
	if len(args) > 2 {
		var err error
		if n, err = strconv.ParseInt(args[2], 10, 64); err != nil {
			return errUsage
		}
	}
	serve := map[string]func(*net.TCPConn){
		"echo":   func(c *net.TCPConn) { _, _ = io.Copy(c, c) },
		"digest": func(c *net.TCPConn) { answerDigest(c) },
		"noise":  func(c *net.TCPConn) { _, _ = io.Copy(c, noiseOf(n)) },
		"flood":  func(c *net.TCPConn) { _, _ = io.Copy(c, noiseOf(1<<60)) },
		"mute":   func(c *net.TCPConn) { select {} },
		"bye":    bye,
		"reset": func(c *net.TCPConn) { // after a byte
			_, _ = c.Read(make([]byte, 1))
			_ = c.SetLinger(0)
		},
		"refuse": func(c *net.TCPConn) { // to read on, with an answer
			_, _ = c.Read(make([]byte, 1))
			fmt.Fprintln(c, "too much")
		},
	}[args[1]]
	if serve == nil {
		return errUsage
	}
	l, err := net.Listen("tcp", args[0])
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			}()
		}
	}()
	_, err = fmt.Println("listening", args[0])
	return err
}

// answerDigest answers only after the client has closed its sending direction.
func answerDigest(c *net.TCPConn) {
	if sum, err := sumUp(c); err == nil {
		fmt.Fprintln(c, sum)
	}
}

// bye closes its own sending direction first and prints what still comes.
func bye(c *net.TCPConn) {
	fmt.Fprintln(c, "bye")
	_ = c.CloseWrite()
	sum, err := sumUp(c)
	fmt.Println("after bye", sum, err)
}
