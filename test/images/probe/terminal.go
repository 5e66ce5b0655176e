package main

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// line reads not a byte more than the line, so that the next step finds the
// rest.
func line([]string) error {
	text, err := readLine()
	switch {
	case errors.Is(err, io.EOF):
		fmt.Println("end of input")
		return nil
	case err == nil:
		fmt.Printf("got %q\n", text)
	}
	return err
}

func until(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	for {
		text, err := readLine()
		if err != nil {
			return err
		}
		fmt.Println(text)
		if text == args[0] {
			return nil
		}
	}
}

func readLine() (string, error) {
	var text []byte
	one := make([]byte, 1)
	for {
		if _, err := os.Stdin.Read(one); err != nil {
			return "", err
		}
		if one[0] == '\n' {
			return strings.TrimSuffix(string(text), "\r"), nil
		}
		text = append(text, one[0])
	}
}

func digest([]string) error {
	sum, err := sumUp(os.Stdin)
	if err == nil {
		_, err = fmt.Println(sum)
	}
	return err
}

func sumUp(r io.Reader) (string, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return fmt.Sprintf("%d %x", n, h.Sum(nil)), err
}

// noise prints the same bytes each time, fast, and without a pattern.
func noise(args []string) error {
	out, args := stream(args)
	if len(args) != 1 {
		return errUsage
	}
	n, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return errUsage
	}
	_, err = io.Copy(out, noiseOf(n))
	return err
}

func noiseOf(n int64) io.Reader {
	return bufio.NewReaderSize(io.LimitReader(rand.NewChaCha8([32]byte{}), n), 1<<16)
}

func flood(args []string) error {
	out, args := stream(args)
	var pause time.Duration
	if len(args) > 0 {
		var err error
		if pause, err = time.ParseDuration(args[0]); err != nil {
			return errUsage
		}
	}
	block := []byte(strings.Repeat("flood\n", 10000))
	for {
		if _, err := out.Write(block); err != nil {
			return err
		}
		time.Sleep(pause)
	}
}

func sizes([]string) error {
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGWINCH)
	was := ""
	for ; ; <-changes {
		ws, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
		if err != nil {
			return fmt.Errorf("standard input is no terminal: %w", err)
		}
		if now := fmt.Sprintf("size %dx%d", ws.Col, ws.Row); now != was {
			was = now
			fmt.Println(now)
		}
	}
}
