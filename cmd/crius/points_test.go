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

// pointsSocket names the unix socket of whoever wants to decide what happens at
// each point of the server's work. With it in the environment the test binary is
// crius itself.
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

// askPoints tells of a point and does as it is told: go on (an empty line), fail
// with the text, or be killed before there is an answer.
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
