package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestCommand(t *testing.T) {
	for _, c := range []struct {
		name                           string
		entrypoint, cmd, command, args []string
		want                           string // "" is Invalid
	}{
		{"image as it is", []string{"e1", "e2"}, []string{"c"}, nil, nil, "e1 e2 c"},
		{"image without entrypoint", nil, []string{"c1", "c2"}, nil, nil, "c1 c2"},
		{"command drops both", []string{"e"}, []string{"c"}, []string{"x"}, nil, "x"},
		{"args drop cmd", []string{"e"}, []string{"c"}, nil, []string{"a"}, "e a"},
		{"command and args", []string{"e"}, []string{"c"}, []string{"x"}, []string{"a"}, "x a"},
		{"args alone", nil, []string{"c"}, nil, []string{"a"}, "a"},
		{"nothing", nil, nil, nil, nil, ""},
		{"entrypoint reset", []string{""}, []string{"c"}, nil, nil, "c"},
		{"entrypoint reset, args", []string{""}, []string{"c"}, nil, []string{"a"}, "a"},
		{"entrypoint reset, nothing else", []string{""}, nil, nil, nil, ""},
		{"empty program of the image", []string{"", "e"}, []string{"c"}, nil, nil, ""},
		{"empty program", nil, []string{"c"}, []string{""}, []string{"a"}, ""},
		{"NUL", nil, nil, []string{"a", "b\x00c"}, nil, ""},
		{"empty arguments are kept", nil, nil, []string{"a", "", "b"}, nil, "a  b"},
	} {
		in := typical()
		in.Request.Image = &imagespec.ImageConfig{Entrypoint: c.entrypoint, Cmd: c.cmd}
		in.Request.Container.Command, in.Request.Container.Args = c.command, c.args
		s, err := Container(in)
		if c.want == "" {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: error %v", c.name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := strings.Join(s.Process.Args, " "); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	in := typical()
	in.Request.Image = nil
	if _, err := Container(in); !errors.Is(err, fault.Invalid) {
		t.Errorf("no image and no command: %v", err)
	}
}

func TestEnvironment(t *testing.T) {
	in := typical()
	in.Defaults.Env = []string{"A=default", "B=default"}
	in.Request.Image.Env = []string{"B=image", "C=image", "NOVALUE", "=x", "C=image again", "D=a=b"}
	in.Request.Container.Envs = []*cri.KeyValue{
		{Key: "C", Value: []byte("request")},
		{Key: "E", Value: []byte{0xff, 0xfe}},
		{Key: "F", Value: nil},
		{Key: "C", Value: []byte("request again")},
	}
	s, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"PATH=" + defaultPath, "HOSTNAME=web", "A=default", "B=image", "C=request again", "D=a=b",
		"E=\xff\xfe", "F=", "HOME=/root",
	}
	if !slices.Equal(s.Process.Env, want) {
		t.Errorf("got %q", s.Process.Env)
	}
}

func TestEnvironmentRefused(t *testing.T) {
	for name, change := range map[string]func(*Input){
		"empty key":         func(in *Input) { in.Request.Container.Envs[0].Key = "" },
		"equals in key":     func(in *Input) { in.Request.Container.Envs[0].Key = "A=B" },
		"NUL in key":        func(in *Input) { in.Request.Container.Envs[0].Key = "A\x00" },
		"NUL in value":      func(in *Input) { in.Request.Container.Envs[0].Value = []byte("a\x00b") },
		"NUL in the image":  func(in *Input) { in.Request.Image.Env = []string{"A=\x00"} },
		"NUL in a default":  func(in *Input) { in.Defaults.Env = []string{"A=\x00"} },
		"NUL in image name": func(in *Input) { in.Request.Image.Env = []string{"A\x00=1"} },
	} {
		in := typical()
		change(&in)
		if _, err := Container(in); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTermAndHome(t *testing.T) {
	env := func(s *specs.Spec, name string) string {
		for _, entry := range s.Process.Env {
			if value, ok := strings.CutPrefix(entry, name+"="); ok {
				return value
			}
		}
		return "(unset)"
	}
	s := mutate(t, func(in *Input) {})
	if env(s, "TERM") != "(unset)" || s.Process.Terminal {
		t.Error("TERM without a terminal")
	}
	s = mutate(t, func(in *Input) { in.Request.Container.Tty = true })
	if env(s, "TERM") != "xterm" || !s.Process.Terminal {
		t.Error("no TERM with a terminal")
	}
	s = mutate(t, func(in *Input) {
		in.Request.Container.Tty = true
		in.Request.Image.Env = []string{"TERM=dumb", "HOME=/opt"}
	})
	if env(s, "TERM") != "dumb" || env(s, "HOME") != "/opt" {
		t.Errorf("the image's own are not kept: %q", s.Process.Env)
	}
	s = mutate(t, func(in *Input) { in.Request.Container.Envs = []*cri.KeyValue{{Key: "HOSTNAME", Value: []byte("mine")}} })
	if env(s, "HOSTNAME") != "mine" {
		t.Error("the request's HOSTNAME is not kept")
	}
	for want, change := range map[string]func(*Input){
		"/":    func(in *Input) { in.Request.Image.Env = nil },
		"/srv": func(in *Input) { in.Request.Image.WorkingDir = "/srv" },
		"/cwd": func(in *Input) { in.Request.Image.WorkingDir, in.Request.Container.WorkingDir = "/srv", "/cwd" },
		"/env": func(in *Input) { in.Request.Image.WorkingDir, in.Request.Image.Env = "/srv", []string{"HOME=/env"} },
		"/req": func(in *Input) {
			in.Request.Image.Env, in.Request.Container.Envs = []string{"HOME=/env"}, []*cri.KeyValue{{Key: "HOME", Value: []byte("/req")}}
		},
	} {
		in := typical()
		in.Request.Image.WorkingDir, in.Request.Container.WorkingDir = "", ""
		change(&in)
		if got := in.Home(); got != want {
			t.Errorf("home of a user without a passwd entry: %q, want %q", got, want)
		}
	}
	for home, want := range hostileHomes() {
		s := mutate(t, func(in *Input) { in.Facts.User.Home, in.Facts.User.Username = home, "app" })
		if env(s, "HOME") != want {
			t.Errorf("home %.30q gives %.30q, want %q", home, env(s, "HOME"), want)
		}
	}
}

// Open files are limited as for a process that nobody has given another limit, whatever the
// server's own is (cri-o#7703).
func TestLimitOfOpenFiles_crio_7703(t *testing.T) {
	asked := []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 5, Hard: 6}}
	base, err := ParseBase([]byte(`{"process": {"rlimits": [{"type": "RLIMIT_NOFILE", "soft": 7, "hard": 8}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change     func(*Input)
		soft, hard uint64
	}{
		"server with a high limit": {func(in *Input) { in.Facts.OpenFiles = 1 << 20 }, 1024, 1 << 20},
		"server with a low limit":  {func(in *Input) { in.Facts.OpenFiles = 512 }, 512, 512},
		"default_ulimits":          {func(in *Input) { in.Facts.OpenFiles, in.Defaults.Ulimits = 1<<20, asked }, 5, 6},
		"annotation":               {func(in *Input) { in.Facts.OpenFiles, in.Asked.Ulimits = 1<<20, asked }, 5, 6},
		"annotation before others": {func(in *Input) {
			in.Defaults.Base, in.Defaults.Ulimits, in.Asked.Ulimits = base, []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 2}}, asked
		}, 5, 6},
		"base spec": {func(in *Input) { in.Facts.OpenFiles, in.Defaults.Base = 1<<20, base }, 7, 8},
		"unknown":   {func(in *Input) { in.Facts.OpenFiles = 0 }, 0, 0},
	} {
		var got specs.POSIXRlimit
		found := 0
		for _, l := range mutate(t, c.change).Process.Rlimits {
			if l.Type == "RLIMIT_NOFILE" {
				got = l
				found++
			}
		}
		if found > 1 {
			t.Errorf("%s: %d limits, and runtimes take one or the other", name, found)
		}
		if got.Soft != c.soft || got.Hard != c.hard {
			t.Errorf("%s: %+v, want %d and %d", name, got, c.soft, c.hard)
		}
	}
}

func TestOpenFilesAboveTheKernels(t *testing.T) {
	for hard, refused := range map[uint64]bool{1 << 20: false, 1<<20 + 1: true, ^uint64(0): true} {
		limits := []specs.POSIXRlimit{{Type: "RLIMIT_CORE", Hard: ^uint64(0)}, {Type: "RLIMIT_NOFILE", Hard: hard}}
		if err := CheckOpenFiles(limits, 1<<20); errors.Is(err, fault.Invalid) != refused {
			t.Errorf("%d: %v", hard, err)
		}
		if err := CheckOpenFiles(limits, 0); err != nil {
			t.Errorf("%d, with an unknown maximum: %v", hard, err)
		}
	}
}

// hostileHomes maps home directories to the expected result.
func hostileHomes() map[string]string {
	return map[string]string{
		"/home/app":                      "/home/app",
		"/home/with space":               "/home/with space",
		"/home/ünïcode":                  "/home/ünïcode",
		"":                               "/",
		"relative":                       "/",
		"/x\nroot::0:0::/:/bin/sh":       "/", // CVE-2022-4318
		"/x\rroot::0:0::/:/bin/sh":       "/", // CVE-2026-15809 compared with the two characters \n
		`/x\nroot::0:0::/:/bin/sh`:       "/", // colons
		"/x\u2028y":                      "/",
		"/x\x00y":                        "/",
		"/x\x7fy":                        "/",
		"/x\xffy":                        "/",
		"/x:/y":                          "/",
		"/" + strings.Repeat("a", 1<<20): "/",
	}
}

func TestWorkdir(t *testing.T) {
	for _, c := range []struct{ request, image, want string }{
		{"", "", "/"},
		{"", "/srv", "/srv"},
		{"/tmp", "/srv", "/tmp"},
		{"/tmp/../var//lib/", "", "/var/lib"},
		{"/../..", "", "/"},
		{"/proc", "", "/proc"},
		{"/proc/sys", "", "/proc/sys"},
		{"/proc/self/fd/7/../../..", "", "/proc"},
		{"/dev/shm", "", "/dev/shm"},
		{"/process/self/fd", "", "/process/self/fd"},
		{"relative", "", ""},
		{"", "./relative", ""},
		{"/a\x00b", "", ""},
	} {
		in := typical()
		in.Request.Container.WorkingDir, in.Request.Image.WorkingDir = c.request, c.image
		s, err := Container(in)
		switch {
		case c.want == "" && !errors.Is(err, fault.Invalid):
			t.Errorf("%q, %q: %v", c.request, c.image, err)
		case c.want != "" && err != nil:
			t.Errorf("%q, %q: %v", c.request, c.image, err)
		case c.want != "" && s.Process.Cwd != c.want:
			t.Errorf("%q, %q: %q, want %q", c.request, c.image, s.Process.Cwd, c.want)
		}
	}
}

func TestWorkdirIsNoDescriptor_CVE_2024_21626(t *testing.T) {
	for _, dir := range []string{
		"/proc/self/fd/7", "/proc/self", "/proc/self/cwd", "/proc/1/root/etc",
		"/proc/thread-self/fd/8", "/proc//self/./fd/9", "/x/../proc/self/fd/3", "/dev/fd/7", "/dev/stdin",
		"/proc/12345/task/1/fd/3",
	} {
		in := typical()
		in.Request.Image.WorkingDir = dir
		if _, err := Container(in); !errors.Is(err, fault.Invalid) {
			t.Errorf("working directory %s of an image: %v", dir, err)
		}
	}
}

func TestOOMScore(t *testing.T) {
	for _, c := range []struct {
		asked int64
		floor int
		want  int
	}{
		{0, -1000, 0}, {-997, -1000, -997}, {1000, -1000, 1000}, {-1000, -1000, -1000},
		{-997, 0, 0}, {-997, -500, -500}, {3, 5, 5},
	} {
		s := mutate(t, func(in *Input) {
			in.Request.Container.Linux.Resources.OomScoreAdj = c.asked
			in.Facts.Host.OOMScoreAdjMin = c.floor
		})
		if *s.Process.OOMScoreAdj != c.want {
			t.Errorf("asked %d, floor %d: %d, want %d", c.asked, c.floor, *s.Process.OOMScoreAdj, c.want)
		}
	}
	for _, asked := range []int64{-1001, 1001, 1 << 40} {
		in := typical()
		in.Request.Container.Linux.Resources.OomScoreAdj = asked
		if _, err := Container(in); !errors.Is(err, fault.Invalid) {
			t.Errorf("%d: %v", asked, err)
		}
	}
}

func TestParseUlimit(t *testing.T) {
	for text, want := range map[string]specs.POSIXRlimit{
		"nofile=1024:4096":        {Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 4096},
		"core=0":                  {Type: "RLIMIT_CORE"},
		"memlock=-1":              {Type: "RLIMIT_MEMLOCK", Soft: ^uint64(0), Hard: ^uint64(0)},
		"nproc=100:unlimited":     {Type: "RLIMIT_NPROC", Soft: 100, Hard: ^uint64(0)},
		"sigpending=0:4294967296": {Type: "RLIMIT_SIGPENDING", Hard: 1 << 32},
	} {
		if got, err := ParseUlimit(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "nofile", "nofile=", "nofile=a", "nofile=a:5", "nofile=5:b", "nofile=2:1", "nofile=1:2:3", "files=1", "NOFILE=1", "nofile=-2"} {
		if got, err := ParseUlimit(text); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

// FuzzEnvironment: whatever image and request contain, the runtime gets
// NAME=value entries with each name once, and the request wins.
func FuzzEnvironment(f *testing.F) {
	f.Add("A=1", "B", "x")
	f.Add("=", "A=B", "\x00")
	f.Add("PATH=", "PATH", "y")
	f.Fuzz(func(t *testing.T, imageEntry, key, value string) {
		in := typical()
		in.Request.Image.Env = []string{imageEntry, "A=1"}
		in.Request.Container.Envs = []*cri.KeyValue{{Key: key, Value: []byte(value)}}
		s, err := Container(in)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		seen := map[string]string{}
		for _, entry := range s.Process.Env {
			name, v, ok := strings.Cut(entry, "=")
			if _, again := seen[name]; !ok || name == "" || again || strings.Contains(entry, "\x00") {
				t.Fatalf("%q in %q", entry, s.Process.Env)
			}
			seen[name] = v
		}
		if seen[key] != value {
			t.Fatalf("%q is %q, asked for %q", key, seen[key], value)
		}
	})
}
