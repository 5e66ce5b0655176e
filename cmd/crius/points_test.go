package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage"
)

// pointsSocket is the variable with the unix socket of the test that decides what happens
// at each failpoint of the server. If it is set, the test binary acts as crius.
const pointsSocket = "CRIUS_POINTS"

func TestMain(m *testing.M) {
	if storage.Init() {
		return
	}
	socket := os.Getenv(pointsSocket)
	if socket == "" {
		os.Exit(m.Run())
	}
	_ = os.Unsetenv(pointsSocket)
	p := program{hook: func(at trace.Point) error { return askPoints(socket, at) }}
	os.Exit(runUntilSignal(p.root()))
}

// askPoints reports a point and follows the answer: an empty line to continue, or a text to
// fail with. The process may also be killed before it gets an answer.
func askPoints(socket string, at trace.Point) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := json.NewEncoder(conn).Encode(at); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return fmt.Errorf("no answer at point %v: %w", at, err)
	}
	if answer == "\n" {
		return nil
	}
	return errors.New(answer[:len(answer)-1])
}
