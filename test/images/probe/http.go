package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/wait"
)

func serve(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	http.HandleFunc("/facts", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(facts.Self())
	})
	http.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		body, err := fetch(r.URL.Query().Get("url"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		_, _ = w.Write(body)
	})
	http.HandleFunc("/exists", func(w http.ResponseWriter, r *http.Request) {
		if _, err := os.Stat(r.URL.Query().Get("file")); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/grpc.health.v1.Health/Check", health)
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Println(r.Method, r.URL.Path)
		fmt.Fprintln(w, args[1])
	})
	server := http.Server{Addr: args[0], Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true) // gRPC
	// Without keep-alives: one that is sent while a test has removed the rules of
	// address translation is answered with a reset.
	quiet := net.ListenConfig{KeepAlive: -1}
	listener, err := quiet.Listen(context.Background(), "tcp", args[0])
	if err != nil {
		return err
	}
	return server.Serve(listener)
}

// health answers like gRPC's health service, for a service that is a file:
// serving while the file exists. Both messages have one field and are
// uncompressed.
func health(w http.ResponseWriter, r *http.Request) {
	request, err := io.ReadAll(r.Body)
	const header, field = 5, 2 // compression and length; tag and length
	serving := byte(1)
	if err == nil && len(request) > header+field {
		if _, err := os.Stat(string(request[header+field:])); err != nil {
			serving = 2
		}
	}
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Trailer", "Grpc-Status")
	_, _ = w.Write([]byte{0, 0, 0, 0, field, 1 << 3, serving})
	w.Header().Set("Grpc-Status", "0")
}

func get(args []string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if len(args) > 0 && args[0] == "-now" {
		args = args[1:]
		cancel()
	}
	if len(args) != 1 {
		return errUsage
	}
	var body []byte
	var err error
	wait.Until(ctx, func() bool { body, err = fetch(args[0]); return err == nil })
	if err == nil {
		_, err = os.Stdout.Write(body)
	}
	return err
}

func fetch(url string) ([]byte, error) {
	client := http.Client{Timeout: wait.Limit}
	resp, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		err = errors.Join(err, fmt.Errorf("%s: %s: %s", url, resp.Status, body))
	}
	return body, err
}
