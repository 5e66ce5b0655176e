package foreign

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	containerds "github.com/crius-run/crius/test/kit/containerd"
)

// line is a key in a file of testdata/keys, with a value that is not the default, and the versions that read
// it, such as 1.33-1.37; none: all.
type line struct{ key, value, versions string }

// linesIn returns the lines of a file of testdata/keys.
func linesIn(t *testing.T, file string) (lines []line) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata/keys", file))
	if err != nil {
		t.Fatal(err)
	}
	for text := range strings.Lines(string(text)) {
		key, rest, is := strings.Cut(strings.TrimSpace(text), " = ")
		if !is || strings.HasPrefix(text, "#") {
			continue
		}
		value, versions, _ := strings.Cut(rest, " # ")
		lines = append(lines, line{key, value, versions})
	}
	return lines
}

// in reports whether a version reads the key.
func (l line) in(version string) bool {
	if l.versions == "" {
		return true
	}
	first, last, isRange := strings.Cut(l.versions, "-")
	return version == first || isRange && first <= version && version <= last
}

func document(lines []line) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l.key + " = " + l.value + "\n")
	}
	return b.String()
}

// general returns the key in the rules of a key in testdata/keys.
func (l line) general(of func(path []string) (string, string)) string {
	path := strings.Split(l.key, ".")
	if before, rest, quoted := strings.Cut(l.key, `."`); quoted {
		id, after, _ := strings.Cut(rest, `".`)
		path = append([]string{before, id}, strings.Split(after, ".")...)
	}
	key, _ := of(path)
	return key
}

func TestEveryKeyOfCrioHasOneRule(t *testing.T) {
	t.Parallel()
	var wanted, have []string
	for _, l := range linesIn(t, "crio.txt") {
		wanted = append(wanted, l.general(generalCRIO))
	}
	if len(wanted) < 150 {
		t.Errorf("only %d keys are listed", len(wanted))
	}
	for _, r := range crioRules {
		have = append(have, r.key)
	}
	for _, key := range wanted {
		if !slices.Contains(have, key) {
			t.Errorf("%s has no rule", key)
		}
	}
	for _, key := range have {
		if !slices.Contains(wanted, key) {
			t.Errorf("%s is not a key of CRI-O", key)
		}
	}
}

// wantEachToCount fails for keys that change nothing and of which nothing is said, and for those of which
// the import says only that it does not know them.
func wantEachToCount(t *testing.T, lines []line, read func(text string) (*Import, error)) {
	t.Helper()
	all, err := read(document(lines))
	if err != nil {
		t.Fatal(err)
	}
	said := slices.Concat(all.Builtin, all.Unused)
	for _, r := range all.Remarks {
		said = append(said, r.Key)
		if strings.Contains(r.Text, "unknown") {
			t.Errorf("%s: %s", r.Key, r.Text)
		}
	}
	none, err := read("")
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range lines {
		if slices.ContainsFunc(said, l.isNamedBy) {
			continue
		}
		without, err := read(document(slices.Concat(lines[:i:i], lines[i+1:])))
		if err != nil || !sameSettings(all, without) { // an error: the others need it
			continue
		}
		if alone, err := read(document(lines[i : i+1])); err != nil || sameSettings(none, alone) {
			t.Errorf("%s = %s is lost without a word", l.key, l.value)
		}
	}
}

// isNamedBy reports whether what an import says of a key, which may be that of a table, is about l.
func (l line) isNamedBy(said string) bool {
	said, _, _ = strings.Cut(said, ": ")
	return said == l.key || strings.HasPrefix(said, l.key+".") || strings.HasPrefix(l.key, said+".")
}

func sameSettings(a, b *Import) bool {
	return slices.EqualFunc(a.Settings, b.Settings, func(a, b Setting) bool { return a.Key == b.Key && Format(a.Value) == Format(b.Value) })
}

func TestNoKeyOfCrioIsLostWithoutAWord(t *testing.T) {
	t.Parallel()
	all := linesIn(t, "crio.txt")
	for _, version := range []string{"1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"} {
		lines := slices.DeleteFunc(slices.Clone(all), func(l line) bool { return !l.in(version) })
		if len(lines) < 130 {
			t.Errorf("only %d keys are listed for %s", len(lines), version)
		}
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			wantEachToCount(t, lines, func(text string) (*Import, error) {
				return CRIO(etc(t, map[string]string{"crio.conf": text}))
			})
		})
	}
}

// The lists have every key that containerds write into their default configuration.
func TestListsHaveTheKeysOfContainerd(t *testing.T) {
	t.Parallel()
	listed := linesIn(t, "containerd.txt")
	for name, kind := range containerds.Kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			program, err := kind.Program(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			text, err := exec.CommandContext(t.Context(), program, "config", "default").Output()
			if err != nil {
				t.Fatal(err)
			}
			top, err := parse(name, text)
			if err != nil {
				t.Fatal(err)
			}
			keys := 0
			top.walk(func([]string) bool { return false }, func(path []string, _ leaf) {
				keys++
				path = slices.Clone(path)
				for i := range path[:len(path)-1] {
					if path[i] == "runtimes" || path[i] == "stream_processors" {
						path[i+1] = anyName
					}
				}
				key := keyOf(path)
				if !slices.Contains([]string{"version", "imports"}, key) && !slices.ContainsFunc(listed, func(l line) bool { return l.isNamedBy(key) }) {
					t.Errorf("%s is not listed", key)
				}
			})
			if keys < 100 {
				t.Errorf("only %d keys in the default configuration", keys)
			}
		})
	}
}

func TestNoKeyOfContainerdIsLostWithoutAWord(t *testing.T) {
	t.Parallel()
	all := linesIn(t, "containerd.txt")
	if len(all) < 280 {
		t.Errorf("only %d keys are listed", len(all))
	}
	for version, format := range map[string]int{"1.6": 2, "1.7": 2, "2.0": 3, "2.1": 3, "2.2": 3, "2.3": 4, "2.4": 4} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			lines := slices.DeleteFunc(slices.Clone(all), func(l line) bool { return !l.in(version) })
			wantEachToCount(t, lines, func(text string) (*Import, error) {
				dir := etc(t, map[string]string{"c.toml": fmt.Sprintf("version = %d\n%s", format, text)})
				return Containerd(filepath.Join(dir, "c.toml"))
			})
		})
	}
}

// A key that may restrict pods or clients, by what its name says, is carried over or its loss must be
// accepted. The others are here, with what they do.
func TestEveryKeyThatMayRestrictIsCarriedOverOrRefused(t *testing.T) {
	t.Parallel()
	names := regexp.MustCompile("seccomp|apparmor|selinux|capabilit|privileg|tls|auth|signature|verif|validat|reject|allow|mappa|mapping|read_only|pids|" +
		"short_name|registr|namespace|device|restrict|policy|decrypt|writable|criu|checkpoint|unpriv|disable|proc_mount|sandbox|untrusted|pull_image|uid|gid")
	harmless := map[string]string{
		"add_inheritable_capabilities": "grants", "insecure_registries": "grants; without it pulls fail", "container_level_enabled": "grants", "container_level": "grants",
		"enable_checkpoint_restore": "grants", "enable_experimental_restore_via_create": "grants", "sandboxer": "another protocol", "sandbox_mode": "another protocol",
		"selinux_category_range": "which of equally strict labels", "disable_cgroup": "grants", "enable_criu_support": "root of the node asks for checkpoints", "enable_criu": "the same",
		"pause_image_auth_file": "no such image", "tcp_tls_ca": "no such socket", "tcp_tls_cert": "no such socket", "tcp_tls_key": "no such socket", "tcp_tls_common_name": "no such socket",
		"uid": "of the socket, which is root's", "auths": "without them pulls fail", "registry.configs": "without them pulls fail", "registry.mirrors": "without them pulls fail",
		"registry.headers": "without them pulls fail", "auto_reload_registries": "always on", "key_model": "without it pulls fail",
		"disallowed_annotations": "CRI-O computes it", "gid": "of a socket that is not there", "disable_tcp_service": "no such socket", "sandbox_image": "no such image",
		"disable_hugetlb_controller": "grants", "restrict_oom_score_adj": "always so where it matters", "disable_snapshot_annotations": "how images are stored",
		"disable_pause_image_pull": "no such image", "runtime_pull_image": "kata-deploy sets it for every handler; the node verifies images",
	}
	for _, r := range slices.Concat(crioRules, containerdRules) {
		last := r.key[strings.LastIndexByte(r.key, '.')+1:]
		known := harmless[last] != "" || slices.ContainsFunc(slices.Collect(maps.Keys(harmless)), func(k string) bool { return strings.HasSuffix(r.key, "."+k) })
		if r.verdict == mapped || r.restricts || known || !names.MatchString(r.key) {
			continue
		}
		t.Errorf("%s is neither carried over nor refused: %v, %s", r.key, r.verdict, r.why)
	}
}

// Every rule has a target, or says what the lack of one means.
func TestRulesAreWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range slices.Concat(crioRules, containerdRules) {
		if seen[r.key] {
			t.Errorf("%s has two rules", r.key)
		}
		seen[r.key] = true
		switch r.verdict {
		case mapped:
			if r.to == "" || r.why != "" || r.off != nil || r.joint == (r.as != nil) {
				t.Errorf("%s is mapped by %+v", r.key, r)
			}
			if strings.Contains(r.key, anyName) != strings.Contains(r.to, anyName) {
				t.Errorf("%s is mapped to %s", r.key, r.to)
			}
		case builtin, refused:
			if r.to != "" || r.why == "" || r.as != nil || r.unset != nil {
				t.Errorf("%s is not mapped, and has %+v", r.key, r)
			}
		default:
			t.Errorf("%s has no verdict", r.key)
		}
		if strings.HasSuffix(r.why, ".") || strings.Contains(r.why, "  ") {
			t.Errorf("%s: %q is no phrase", r.key, r.why)
		}
	}
}

// CRI-O never waits for less than half a minute.
func TestCreateTimeoutIsAsCRIOReadsIt(t *testing.T) {
	t.Parallel()
	for seconds, want := range map[int64]string{0: "4m0s", 15: "30s", 30: "30s", 90: "1m30s"} {
		if got, err := createTimeout(seconds); err != nil || got != want {
			t.Errorf("%d: %v, %v, want %s", seconds, got, err, want)
		}
	}
	if _, err := createTimeout(int64(-1)); err == nil {
		t.Error("a negative number is accepted")
	}
}
