package main

import (
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
)

const module = "github.com/crius-run/crius/"

// pattern matches the names of the tests, for -run.
const pattern = `_(CVE|GO|GHSA)_`

var idInName = regexp.MustCompile(`_(?:CVE_\d{4}_\d+|GO_\d{4}_\d+|GHSA(?:_[0-9a-z]{4}){3})`)

// test is a test that is named after vulnerabilities.
type test struct {
	dir, name string
	ids       []string // such as CVE-2025-0750
}

// find reads the sources below root, as built with these build tags.
func find(root string, tags []string) ([]test, error) {
	built := build.Default
	built.BuildTags = tags
	var tests []test
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != root && strings.HasPrefix(e.Name(), "."):
			return filepath.SkipDir
		case e.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		if included, err := built.MatchFile(filepath.Dir(path), e.Name()); err != nil || !included {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		found, err := testsIn(path, filepath.ToSlash(dir))
		tests = append(tests, found...)
		return err
	})
	return tests, err
}

func testsIn(path, dir string) ([]test, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var tests []test
	for _, d := range file.Decls {
		f, isFunc := d.(*ast.FuncDecl)
		if !isFunc || f.Recv != nil || !strings.HasPrefix(f.Name.Name, "Test") {
			continue
		}
		var ids []string
		for _, id := range idInName.FindAllString(f.Name.Name, -1) {
			ids = append(ids, strings.ReplaceAll(id[1:], "_", "-"))
		}
		if len(ids) > 0 {
			tests = append(tests, test{dir, f.Name.Name, ids})
		}
	}
	return tests, nil
}
