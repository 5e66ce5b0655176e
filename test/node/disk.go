package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/crius-run/crius/test/kit/critest"
)

// outputSize is the size of the disk for results; only what is written takes
// space.
const outputSize = 256 << 20

// newest returns the newest file that matches the pattern; none is an error.
func newest(pattern string) (string, error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	var found os.FileInfo
	var path string
	for _, file := range files {
		info, err := os.Stat(file)
		if err != nil {
			return "", err
		}
		if found == nil || info.ModTime().After(found.ModTime()) {
			found, path = info, file
		}
	}
	if found == nil {
		return "", fmt.Errorf("there is no %s", pattern)
	}
	return path, nil
}

// writeInput makes the disk that the guest unpacks first: an archive with the
// options and all files, as programs.
func writeInput(path string, o options, files map[string]string) (err error) {
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w := tar.NewWriter(out)
	add := func(name string, data []byte) error {
		h := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(data))}
		if err := w.WriteHeader(&h); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	wanted, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := add("options.json", wanted); err != nil {
		return err
	}
	for name, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := add(name, data); err != nil {
			return err
		}
	}
	return w.Close()
}

// unpack unpacks the guest's files, which are all in one directory. A disk to
// which the guest wrote nothing is an error.
func unpack(path, dir string) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	count := 0
	for r := tar.NewReader(in); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) && count > 0 {
			return os.Remove(path)
		}
		if err != nil {
			return fmt.Errorf("the guest ended without results (%w)", err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return fmt.Errorf("the guest's results are cut off: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(h.Name)), data, 0o644); err != nil {
			return err
		}
		count++
	}
}

// judge counts the suite's results, and as failures what was left behind and
// what the guest reported besides the suite.
func judge(dir string) (*critest.Result, error) {
	if text, err := os.ReadFile(filepath.Join(dir, "error")); err == nil {
		return nil, fmt.Errorf("in the guest: %s", text)
	}
	report, err := os.ReadFile(filepath.Join(dir, "report.json"))
	if err != nil {
		return nil, err
	}
	r, err := critest.Read(report)
	if err != nil {
		return nil, err
	}
	for file, about := range map[string]string{"left": "left behind by the suite", "wrong": "what the guest looked at beside the suite"} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return nil, err
		}
		if len(text) > 0 {
			r.Fail(about, string(text))
		}
	}
	log, err := os.ReadFile(filepath.Join(dir, "crius.log"))
	if err != nil {
		return nil, err
	}
	if at := strings.Index(string(log), "goroutine 1 ["); at >= 0 {
		r.Fail("the server's log", "the server crashed: see crius.log")
	}
	return r, nil
}
