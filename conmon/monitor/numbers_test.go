package monitor

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The numbers that the monitor gives to system calls are the kernel's, on every
// architecture for which it can be built. It cannot take them from
// golang.org/x/sys, which would cost it memory.
func TestCallNumbers(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	tables := filepath.Join(strings.TrimSpace(string(out)), "unix")
	machines := constants(t, filepath.Join(tables, "zerrors_linux.go"), "AUDIT_ARCH_")
	for arch, c := range map[string]struct {
		files   []string
		machine string // that the filter names
	}{
		"amd64":   {[]string{"seccomp.go", "seccomp_amd64.go"}, "X8664"},
		"arm":     {[]string{"seccomp.go", "seccomp_arm.go"}, "ARM"},
		"arm64":   {[]string{"seccomp.go", "seccomp_arm64.go"}, "AARCH64"},
		"ppc64le": {[]string{"seccomp.go", "seccomp_ppc64le.go"}, "PPC64LE"},
		"riscv64": {[]string{"seccomp.go", "seccomp_riscv64.go"}, "RISCV64"},
		"386":     {files: []string{"sys_386.go"}},
		"s390x":   {}, "loong64": {},
	} {
		kernel := constants(t, filepath.Join(tables, "zsysnum_linux_"+arch+".go"), "SYS_")
		ours := map[string]uint64{}
		for _, file := range append(c.files, "sys.go") {
			maps.Copy(ours, constants(t, file, "sys"))
			if audit, ok := constants(t, file, "audit")[""]; ok && audit != machines[c.machine] {
				t.Errorf("%s: the filter is for architecture %#x, want %#x", arch, audit, machines[c.machine])
			}
		}
		if want := 3; len(ours) < want {
			t.Errorf("%s: only %d numbers found", arch, len(ours))
		}
		for name, number := range ours {
			if want, ok := kernel[name]; !ok || number != want {
				t.Errorf("%s: %s is %d here, and %d in the kernel", arch, name, number, want)
			}
		}
	}
}

// constants are the numbers that a Go file gives names which begin with prefix, by
// the rest of the name in capitals, without underscores.
func constants(t *testing.T, path, prefix string) map[string]uint64 {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]uint64{}
	for _, d := range file.Decls {
		group, ok := d.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			value := spec.(*ast.ValueSpec)
			rest, ok := strings.CutPrefix(value.Names[0].Name, prefix)
			if !ok || len(value.Values) != 1 {
				continue
			}
			literal, ok := value.Values[0].(*ast.BasicLit)
			if !ok || literal.Kind != token.INT {
				continue
			}
			number, exact := constant.Uint64Val(constant.MakeFromLiteral(literal.Value, token.INT, 0))
			if !exact {
				t.Fatalf("%s: %s is %s", path, value.Names[0].Name, literal.Value)
			}
			numbers[strings.ToUpper(strings.ReplaceAll(rest, "_", ""))] = number
		}
	}
	return numbers
}
