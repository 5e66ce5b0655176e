package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// orphans finds data in the store without a record, and records without data.
// It uses only its own knowledge of how containers/storage keeps them.
func orphans() error {
	layers, err := ids("overlay-layers/layers.json", "overlay-layers/volatile-layers.json")
	if err != nil {
		return err
	}
	images, err := ids("overlay-images/images.json")
	if err != nil {
		return err
	}
	containers, err := ids("overlay-containers/containers.json", "overlay-containers/volatile-containers.json")
	if err != nil {
		return err
	}
	var wrong []string
	wrong = append(wrong, compare("overlay", layers, true)...)
	wrong = append(wrong, compare("overlay-layers", layers, false)...)
	wrong = append(wrong, compare("overlay-images", images, true)...)
	wrong = append(wrong, compare("overlay-containers", containers, false)...)
	wrong = append(wrong, links(layers)...)
	wrong = append(wrong, temporary()...)
	if len(wrong) > 0 {
		return errors.New("in the store:\n" + strings.Join(wrong, "\n"))
	}
	return nil
}

// ids returns those of all records in some files of containers/storage.
func ids(files ...string) ([]string, error) {
	var all []string
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(graph, file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var records []struct{ ID string }
		if err := json.Unmarshal(text, &records); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, r := range records {
			all = append(all, r.ID)
		}
	}
	return all, nil
}

var id = regexp.MustCompile("^[0-9a-f]{64}")

// compare finds files that belong to none of the ids, and with must also ids
// without a file.
func compare(dir string, known []string, must bool) (wrong []string) {
	entries, _ := os.ReadDir(filepath.Join(graph, dir))
	seen := map[string]bool{}
	for _, e := range entries {
		if name := id.FindString(e.Name()); name != "" {
			seen[name] = true
			if !slices.Contains(known, name) {
				wrong = append(wrong, fmt.Sprintf("%s/%s has no record", dir, e.Name()))
			}
		}
	}
	for _, one := range known {
		if must && !seen[one] {
			wrong = append(wrong, fmt.Sprintf("%s of %s is missing", dir, one))
		}
	}
	return wrong
}

// links finds short names of layers that lead nowhere, and layers without one.
func links(layers []string) (wrong []string) {
	used := map[string]bool{}
	for _, layer := range layers {
		name, err := os.ReadFile(filepath.Join(graph, "overlay", layer, "link"))
		if err != nil {
			wrong = append(wrong, err.Error())
			continue
		}
		used[string(name)] = true
		if _, err := os.Stat(filepath.Join(graph, "overlay/l", string(name))); err != nil {
			wrong = append(wrong, err.Error())
		}
	}
	entries, _ := os.ReadDir(filepath.Join(graph, "overlay/l"))
	for _, e := range entries {
		if !used[e.Name()] {
			wrong = append(wrong, "overlay/l/"+e.Name()+" is no layer's")
		}
	}
	return wrong
}

// temporary finds what is staged, downloaded or about to be deleted.
func temporary() (wrong []string) {
	for _, pattern := range []string{
		"crius-pulls/*", "tmp/*", "overlay/tempdirs/*", "overlay-layers/tempdirs/*", "overlay/staging/*", "*/.tmp*", "*/*/.tmp*",
	} {
		found, _ := filepath.Glob(filepath.Join(graph, pattern))
		for _, path := range found {
			wrong = append(wrong, strings.TrimPrefix(path, graph+"/")+" is temporary")
		}
	}
	return wrong
}
