package selinux

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/crius-run/crius/internal/fault"
)

// policy returns the policy files of a node.
func policy(files map[string]string) fstest.MapFS {
	root := fstest.MapFS{}
	for name, text := range files {
		root[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return root
}

func acceptAll(string) error { return nil }

func acceptOnly(types ...string) func(string) error {
	return func(context string) error {
		for _, kind := range types {
			if strings.Contains(context, ":"+kind+":") {
				return nil
			}
		}
		return errors.New("the kernel refuses it")
	}
}

func TestLoad(t *testing.T) {
	const config = "# which policy\nSELINUX=enforcing\nSELINUXTYPE = targeted\n"
	for name, c := range map[string]struct {
		files  map[string]string
		accept func(string) error
		want   Contexts
	}{
		"a policy that names all": {
			files: map[string]string{
				"etc/selinux/config": config,
				"etc/selinux/targeted/contexts/lxc_contexts": "process = \"u:r:p_t:s0\"\nfile=\"u:r:f_t:s0\"\n#ro_file = \"u:r:no_t:s0\"\nro_file = \"u:r:ro_t:s0\"\n" +
					"init_process = \"u:r:i_t:s0\"\nkvm_process = \"u:r:k_t:s0\"\nbroken\n",
				"proc/self/attr/current": "u:r:crius_t:s0-s0:c0.c255\x00",
			},
			accept: acceptAll,
			want: Contexts{
				Process: "u:r:p_t:s0", Init: "u:r:i_t:s0", KVM: "u:r:k_t:s0", Privileged: "system_u:system_r:spc_t:s0",
				File: "u:r:f_t:s0", ReadOnly: "u:r:ro_t:s0", Categories: 256,
			},
		},
		"a policy that names none": {
			files:  map[string]string{"proc/self/attr/current": "u:r:crius_t:s0\n"},
			accept: acceptAll,
			want: Contexts{
				Process: "system_u:system_r:container_t:s0", Init: "system_u:system_r:container_init_t:s0", KVM: "system_u:system_r:container_kvm_t:s0",
				Privileged: "system_u:system_r:spc_t:s0", File: "system_u:object_r:container_file_t:s0",
				ReadOnly: "system_u:object_r:container_ro_file_t:s0", Categories: 1024,
			},
		},
		"a policy that has only what is needed": {
			accept: acceptOnly("container_t", "container_file_t"),
			want: Contexts{
				Process: "system_u:system_r:container_t:s0", Init: "system_u:system_r:container_t:s0", KVM: "system_u:system_r:container_t:s0",
				File: "system_u:object_r:container_file_t:s0", ReadOnly: "system_u:object_r:container_file_t:s0", Categories: 1024,
			},
		},
		"a name of a policy that leads elsewhere": {
			files: map[string]string{
				"etc/selinux/config":                    "SELINUXTYPE=../../tmp",
				"etc/tmp/contexts/lxc_contexts":         "process = \"u:r:evil_t:s0\"\n",
				"tmp/contexts/lxc_contexts":             "process = \"u:r:evil_t:s0\"\n",
				"etc/selinux/tmp/contexts/lxc_contexts": strings.Repeat("#", maxContexts) + "\nprocess = \"u:r:large_t:s0\"\n",
			},
			accept: acceptOnly("container_t", "container_file_t"),
			want: Contexts{
				Process: "system_u:system_r:container_t:s0", Init: "system_u:system_r:container_t:s0", KVM: "system_u:system_r:container_t:s0",
				File: "system_u:object_r:container_file_t:s0", ReadOnly: "system_u:object_r:container_file_t:s0", Categories: 1024,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := load(policy(c.files), c.accept)
			if err != nil || *got != c.want {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

// Without types for containers nothing would confine them, which must not go
// unnoticed.
func TestLoadPolicyWithoutContainers(t *testing.T) {
	for _, lacking := range []func(string) error{acceptOnly(), acceptOnly("container_t")} {
		_, err := load(policy(map[string]string{"etc/selinux/config": "SELINUXTYPE=default\n"}), lacking)
		if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "/etc/selinux/default/contexts/lxc_contexts") ||
			!strings.Contains(err.Error(), "pod.selinux = false") {
			t.Error(err)
		}
	}
}

func TestWith(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{With("u:r:t:s0:c1,c2", "", "", "x_t", ""), "u:r:x_t:s0:c1,c2"},
		{With("u:r:t:s0:c1,c2", "a", "b", "c", "s0:c3.c9"), "a:b:c:s0:c3.c9"},
		{With("u:r:t", "", "", "", "s0"), "u:r:t"},
		{At("u:r:t:s0", "s0:c1,c2"), "u:r:t:s0:c1,c2"},
		{At("u:r:t:s0:c1", ""), "u:r:t:s0:c1"},
		{At("", "s0:c1"), ""},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

// No two pods have the same level, however many are added at once, and a freed
// level can be assigned again.
func TestLevelsAreUnique(t *testing.T) {
	l := NewLevels(20) // 190 pairs
	l.Note("asked", "s0:c3,c4")
	var mu sync.Mutex
	had := map[string]string{"s0:c3,c4": "asked"}
	var pods sync.WaitGroup
	for i := range 100 {
		pods.Go(func() {
			id := fmt.Sprint(i)
			level, err := l.Allot(id)
			mu.Lock()
			defer mu.Unlock()
			if other := had[level]; other != "" || err != nil {
				t.Errorf("pod %s has level %s, and so has %s: %v", id, level, other, err)
			}
			had[level] = id
		})
	}
	pods.Wait()
	var low, high int
	for level := range had {
		if n, err := fmt.Sscanf(level, "s0:c%d,c%d", &low, &high); n != 2 || low >= high || high >= 20 {
			t.Errorf("level %s: %v", level, err)
		}
	}
}

func TestLevelsRunOut(t *testing.T) {
	l := NewLevels(2) // one pair
	if level, err := l.Allot("a"); level != "s0:c0,c1" || err != nil {
		t.Fatal(level, err)
	}
	if _, err := l.Allot("b"); !errors.Is(err, fault.Exhausted) {
		t.Errorf("a second pod: %v", err)
	}
	l.Free("a")
	if level, err := l.Allot("b"); level != "s0:c0,c1" || err != nil {
		t.Error("a level that was given back:", level, err)
	}
	l.Note("c", "") // of a pod from before
	l.Free("c")
}
