package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/crius-run/crius/test/images/facts"
)

// stream removes "-err" from the arguments and returns the stream that it
// selects.
func stream(args []string) (io.Writer, []string) {
	if len(args) > 0 && args[0] == "-err" {
		return os.Stderr, args[1:]
	}
	return os.Stdout, args
}

func echo(args []string) error {
	w, args := stream(args)
	_, err := fmt.Fprintln(w, strings.Join(args, " "))
	return err
}

func numberedLines(args []string) error {
	n, pause, err := countAndPause(args)
	if err != nil {
		return err
	}
	for i := 1; i <= n; i++ {
		if _, err := fmt.Println("line", i); err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return nil
}

func countAndPause(args []string) (n int, pause time.Duration, err error) {
	if len(args) == 0 {
		return 0, 0, errUsage
	}
	if n, err = strconv.Atoi(args[0]); err != nil {
		return 0, 0, errUsage
	}
	if len(args) > 1 {
		pause, err = time.ParseDuration(args[1])
	}
	return n, pause, err
}

// numberedBytes prints "0000000.0000001.…", which reveals any loss, repetition
// or change of order. Width 0 prints no newline at all.
func numberedBytes(args []string) error {
	out, args := stream(args)
	if len(args) == 0 {
		return errUsage
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return errUsage
	}
	width := 0
	if len(args) > 1 {
		if width, err = strconv.Atoi(args[1]); err != nil {
			return errUsage
		}
	}
	w := bufio.NewWriterSize(out, 1<<16)
	for i := range n {
		if err := w.WriteByte(numberedByte(i)); err != nil {
			return err
		}
		if width > 0 && (i+1)%width == 0 {
			_ = w.WriteByte('\n') // Flush returns its error, too
		}
	}
	return w.Flush()
}

// numberedByte returns byte i of the endless text of seven-digit numbers.
func numberedByte(i int) byte {
	if i%8 == 7 {
		return '.'
	}
	n := i / 8 % 10_000_000
	for range 6 - i%8 {
		n /= 10
	}
	return '0' + byte(n%10)
}

func printFacts([]string) error {
	return json.NewEncoder(os.Stdout).Encode(facts.Self())
}
