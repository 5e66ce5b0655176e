package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/crius-run/crius/test/images/facts"
)

func serve(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	http.HandleFunc("/facts", func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(facts.Self())
	})
	http.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		body, err := fetch(r.URL.Query().Get("url"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.Write(body)
	})
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Println(r.Method, r.URL.Path)
		fmt.Fprintln(w, args[1])
	})
	return http.ListenAndServe(args[0], nil)
}

func get(args []string) error {
	deadline := time.Now().Add(10 * time.Second)
	if len(args) > 0 && args[0] == "-now" {
		deadline, args = time.Now(), args[1:]
	}
	if len(args) != 1 {
		return errUsage
	}
	for {
		body, err := fetch(args[0])
		if err == nil {
			_, err = os.Stdout.Write(body)
			return err
		}
		if time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func fetch(url string) ([]byte, error) {
	client := http.Client{Timeout: 5 * time.Second}
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
