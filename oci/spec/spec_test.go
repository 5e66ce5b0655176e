package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestSpecsMatchGoldenFiles compares whole specs with reviewed ones. The default
// seccomp profile has a golden file of its own and is cut out of the others.
func TestSpecsMatchGoldenFiles(t *testing.T) {
	for _, a := range goldenSpecs() {
		t.Run(a.name, func(t *testing.T) {
			s, err := a.spec(a.input())
			if err != nil {
				t.Fatal(err)
			}
			if s.Linux.Seccomp != nil {
				s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: s.Linux.Seccomp.DefaultAction}
			}
			golden(t, "testdata/golden/"+a.name+".json", s)
		})
	}
}

func golden(t *testing.T, file string, v any) {
	t.Helper()
	got := marshal(t, v)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("differs from %s; run with -update and review the difference. Got:\n%s", file, got)
	}
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(data, '\n')
}

// No golden file outlives its goldenSpec.
func TestEverySpecHasAGoldenFile(t *testing.T) {
	files, err := filepath.Glob("testdata/golden/*.json")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, a := range goldenSpecs() {
		want = append(want, "testdata/golden/"+a.name+".json")
	}
	slices.Sort(want)
	if !slices.Equal(files, want) {
		t.Errorf("golden files %v, specs %v", files, want)
	}
}

// Also concurrently, and the input stays unchanged.
func TestEqualInputsGiveEqualSpecs(t *testing.T) {
	for _, a := range goldenSpecs() {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			in := a.input()
			before := marshal(t, in)
			first, err := a.spec(in)
			if err != nil {
				t.Fatal(err)
			}
			want := marshal(t, first)
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					again, err := a.spec(in)
					if err != nil || !bytes.Equal(marshal(t, again), want) {
						t.Errorf("a second spec of the same input differs (error %v)", err)
					}
				})
			}
			wg.Wait()
			if !bytes.Equal(marshal(t, in), before) {
				t.Error("the input was changed")
			}
		})
	}
}

// A spec shares nothing with the input, so that no container can reach data of
// another container's spec. The test overwrites everything reachable from one
// spec; the next spec must not show it.
func TestSpecsShareNothing_CVE_2021_21334(t *testing.T) {
	for _, a := range goldenSpecs() {
		t.Run(a.name, func(t *testing.T) {
			in := a.input()
			profile := DefaultProfile()
			in.Defaults.Seccomp = profile
			first, err := a.spec(in)
			if err != nil {
				t.Fatal(err)
			}
			want := marshal(t, first)
			// Spare capacity is shared as well: append to everything.
			scribble(reflect.ValueOf(first).Elem())
			second, err := a.spec(in)
			if err != nil {
				t.Fatal(err)
			}
			if got := marshal(t, second); !bytes.Equal(got, want) {
				t.Errorf("a change of the first spec shows in the second:\n%s", got)
			}
		})
	}
}

// scribble overwrites everything reachable from v, and the spare capacity of
// slices.
func scribble(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			scribble(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			scribble(v.Field(i))
		}
	case reflect.Slice:
		whole := v.Slice3(0, v.Cap(), v.Cap())
		for i := range whole.Len() {
			scribble(whole.Index(i))
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			v.SetMapIndex(key, reflect.ValueOf("scribble").Convert(v.Type().Elem()))
		}
	case reflect.String:
		v.SetString("scribble")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int64:
		v.SetInt(-77)
	case reflect.Uint, reflect.Uint32, reflect.Uint64:
		v.SetUint(77)
	}
}

// A file without the prefix resolve_ cannot do I/O, because it imports nothing
// that does.
func TestRulesImportNothingThatDoesIO(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	impure := []string{"bufio", "context", "io", "io/fs", "net", "os", "os/exec", "path/filepath", "runtime", "syscall", "time"}
	unixUsers := []string{"profile_default.go", "profile_errno.go", "signals.go"} // constants and tables
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "resolve_") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range parsed.Imports {
			name, _ := strconv.Unquote(spec.Path.Value)
			unix := strings.HasSuffix(name, "/unix") && !slices.Contains(unixUsers, file)
			if slices.Contains(impure, name) || unix {
				t.Errorf("%s imports %s: I/O belongs in a resolve_ file", file, name)
			}
		}
	}
}

func TestIncompleteRequests(t *testing.T) {
	if _, err := Container(Input{}); !errors.Is(err, fault.Invalid) {
		t.Errorf("empty input: %v", err)
	}
	if _, err := Container(Input{Request: Request{Pod: &cri.PodSandboxConfig{}}}); !errors.Is(err, fault.Invalid) {
		t.Errorf("no container: %v", err)
	}
	if _, err := Sandbox(Input{}, []string{"/pause"}); !errors.Is(err, fault.Invalid) {
		t.Errorf("no pod: %v", err)
	}
	if _, err := Sandbox(typical(), nil); !errors.Is(err, fault.Invalid) {
		t.Errorf("no infra command: %v", err)
	}
	in := typical()
	in.Request.Pod.Linux.Sysctls = map[string]string{"vm.overcommit_memory": "1"}
	if _, err := Sandbox(in, []string{"/pause"}); !errors.Is(err, fault.Invalid) {
		t.Errorf("infra of an invalid pod: %v", err)
	}
}

// TestInfraIsTight: the infra container has nothing of what the pod allows its
// containers or the node's defaults allow.
func TestInfraIsTight(t *testing.T) {
	in := typical()
	privilegedPod(&in)
	nodeDefaults(&in)
	userNamespacePod(&in)
	hostNamespaces(&in)
	in.Facts.Devices = []Device{{LinuxDevice: specs.LinuxDevice{Path: "/dev/fuse"}}}
	in.Request.Pod.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
	s, err := Sandbox(in, []string{"/pause", "now"})
	if err != nil {
		t.Fatal(err)
	}
	caps := s.Process.Capabilities
	if len(caps.Bounding)+len(caps.Permitted)+len(caps.Effective)+len(caps.Inheritable)+len(caps.Ambient) != 0 {
		t.Errorf("capabilities %+v", caps)
	}
	if !s.Root.Readonly || !s.Process.NoNewPrivileges || s.Linux.Seccomp == nil || len(s.Linux.MaskedPaths) == 0 ||
		len(s.Linux.Devices) != 0 || s.Linux.Resources.Pids != nil || s.Process.Rlimits != nil {
		t.Errorf("%+v %+v", s.Process, s.Linux)
	}
	if _, own := namespacePaths(s)[specs.PIDNamespace]; own {
		t.Error("a PID namespace in a pod with the node's")
	}
	if !slices.Equal(s.Process.Args, []string{"/pause", "now"}) || slices.Contains(s.Process.Env, "HTTP_PROXY=http://proxy") {
		t.Errorf("%q %q", s.Process.Args, s.Process.Env)
	}
}

// TestNilSafety: any part of the request may be missing.
func TestNilSafety(t *testing.T) {
	in := Input{
		Request: Request{Pod: &cri.PodSandboxConfig{}, Container: &cri.ContainerConfig{Command: []string{"x"}}},
		Facts:   Facts{Namespaces: Namespaces{Net: "/n", PID: "/p"}},
	}
	if _, err := Container(in); err != nil {
		t.Error(err)
	}
	if _, err := Sandbox(in, []string{"/pause"}); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("an infra container without seccomp: %v", err)
	}
	in.Facts.Host.Seccomp = true
	if _, err := Sandbox(in, []string{"/pause"}); err != nil {
		t.Error(err)
	}
}

func fileMode(m os.FileMode) *os.FileMode { return &m }

func compact(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
