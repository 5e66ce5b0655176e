package main_test

import (
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/scene"
)

// version calls CRI as kubelets of that age do; the messages are the same.
type version string

var versions = []version{"v1", "v1alpha2"}

// start creates and starts a container through that version of CRI.
func (v version) start(t *testing.T, p *scene.Pod, line string, change ...scene.ContainerChange) (*scene.Container, error) {
	t.Helper()
	invoke := func(method string, req, reply proto.Message) error {
		return p.World.Conn().Invoke(t.Context(), "/runtime."+string(v)+".RuntimeService/"+method, req, reply)
	}
	name := strings.NewReplacer("/", "-", " ", "-", ",", "").Replace(t.Name())
	config := kubelet.Container(name, images.Probe, scene.Steps(line), change...)
	var created cri.CreateContainerResponse
	if err := invoke("CreateContainer", &cri.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config}, &created); err != nil {
		return nil, err
	}
	c := p.Adopt(created.ContainerId, config)
	return c, invoke("StartContainer", &cri.StartContainerRequest{ContainerId: c.ID}, &cri.StartContainerResponse{})
}

// eachVersion runs a test for each version of CRI, in a pod. Each uses another
// handler, because handler and version are independent.
func eachVersion(t *testing.T, test func(t *testing.T, p *scene.Pod, v version)) {
	t.Helper()
	w := commons.World(t)
	for i, v := range versions {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			test(t, w.Pod(t, scene.Handlers[i]), v)
		})
	}
}

// noMkdir is a profile that forbids one thing that the default one allows, and a system call that
// this node does not know (crun#33).
const noMkdir = `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat", "call_of_another_kernel"], "action": "SCMP_ACT_ERRNO"}]}`

// The forms of a profile.
const (
	newForm = iota
	oldForm
)

// profiled requests a seccomp profile in the new form or in the old one, a
// string, which is the only form that kubelets up to 1.18 know.
func profiled(form int, kind cri.SecurityProfile_ProfileType, text string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = nil
		if form == oldForm {
			c.Linux.SecurityContext.SeccompProfilePath = text
			return
		}
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: kind, LocalhostRef: strings.TrimPrefix(text, "localhost/")}
	}
}

func TestSeccompProfiles(t *testing.T) {
	t.Parallel()
	file := filepath.Join(commons.World(t).Dir(t), "no mkdir.json")
	scene.Write(t, file, noMkdir)
	const byDefault, none, local = cri.SecurityProfile_RuntimeDefault, cri.SecurityProfile_Unconfined, cri.SecurityProfile_Localhost
	cases := map[string]struct {
		change       scene.ContainerChange
		filter       int
		mkdir, mount string // the kernel first finds that the path is wrong
	}{
		"new, default":             {profiled(newForm, byDefault, ""), 2, "ok", "EPERM"},
		"new, unconfined":          {profiled(newForm, none, ""), 0, "ok", "ENOENT"},
		"new, localhost":           {profiled(newForm, local, file), 2, "EPERM", "ENOENT"},
		"old, default":             {profiled(oldForm, byDefault, "runtime/default"), 2, "ok", "EPERM"},
		"old, docker's":            {profiled(oldForm, byDefault, "docker/default"), 2, "ok", "EPERM"},
		"old, unconfined":          {profiled(oldForm, none, "unconfined"), 0, "ok", "ENOENT"},
		"old, nothing":             {profiled(oldForm, none, ""), 0, "ok", "ENOENT"},
		"old, localhost":           {profiled(oldForm, local, "localhost/"+file), 2, "EPERM", "ENOENT"},
		"both, the new one counts": {both(profiled(oldForm, local, "unconfined"), seccompField(local, file)), 2, "EPERM", "ENOENT"},
	}
	eachVersion(t, func(t *testing.T, p *scene.Pod, v version) {
		for name, test := range cases {
			t.Run(name, func(t *testing.T) {
				c, err := v.start(t, p, "try mkdir ; try mount ; sleep", test.change)
				if err != nil {
					t.Fatal(err)
				}
				c.Says(t, test.mkdir+"\n"+test.mount+"\n")
				scene.Equal(t, "Seccomp of the container", statusLine(c.Procfs(t, "status"), "Seccomp"), string(rune('0'+test.filter)))
				scene.Equal(t, "Seccomp of an exec", c.Facts(t).Seccomp, test.filter)
			})
		}
	})
}

// seccompField adds the new form.
func seccompField(kind cri.SecurityProfile_ProfileType, ref string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
	}
}

// A container whose profile cannot be enforced must not run unconfined, and the
// message names the profile.
func TestSeccompProfilesThatCannotBe(t *testing.T) {
	t.Parallel()
	dir := commons.World(t).Dir(t)
	broken, wrong := filepath.Join(dir, "broken.json"), filepath.Join(dir, "wrong.json")
	scene.Write(t, broken, `{"defaultAction": `)
	scene.Write(t, wrong, `{"defaultAction": "SCMP_ACT_NOTHING"}`)
	const local = cri.SecurityProfile_Localhost
	cases := map[string]struct {
		change scene.ContainerChange
		word   string
	}{
		"new, missing":       {profiled(newForm, local, "/none/x.json"), "/none/x.json"},
		"new, broken":        {profiled(newForm, local, broken), broken},
		"new, wrong action":  {profiled(newForm, local, wrong), "SCMP_ACT_NOTHING"},
		"new, a directory":   {profiled(newForm, local, dir), dir},
		"new, endless":       {profiled(newForm, local, "/dev/zero"), "/dev/zero"},
		"new, relative":      {profiled(newForm, local, "x.json"), "x.json"},
		"new, no name":       {profiled(newForm, local, ""), "localhost_ref"},
		"new, unknown type":  {profiled(newForm, 9, ""), "profile_type"},
		"old, missing":       {profiled(oldForm, local, "localhost//none/x.json"), "/none/x.json"},
		"old, relative":      {profiled(oldForm, local, "localhost/x.json"), "x.json"},
		"old, no name":       {profiled(oldForm, local, "localhost/"), "localhost"},
		"old, unknown":       {profiled(oldForm, local, "something"), "something"},
		"old, wrong letters": {profiled(oldForm, local, "Runtime/Default"), "Runtime/Default"},
	}
	eachVersion(t, func(t *testing.T, p *scene.Pod, v version) {
		p.Untouched(t, func() {
			for name, test := range cases {
				t.Run(name, func(t *testing.T) {
					_, err := v.start(t, p, "sleep", test.change)
					scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition}, test.word)
				})
			}
		})
	})
}

// The sandbox's own profile, in both forms.
func TestSeccompOfThePod(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	sandbox := func(text string, profile *cri.SecurityProfile) scene.PodChange {
		return func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext.Seccomp = profile
			c.Linux.SecurityContext.SeccompProfilePath = text
			c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
		}
	}
	const missing = "/none/x.json"
	file := filepath.Join(w.Dir(t), "no mkdir.json")
	scene.Write(t, file, noMkdir)
	for _, text := range []string{"runtime/default", "unconfined"} {
		t.Run("old, "+text, func(t *testing.T) {
			p := w.Pod(t, "crun", sandbox(text, nil))
			p.Finish(t, "echo runs")
			c := p.Start(t, "try mkdir ; sleep", seccompField(cri.SecurityProfile_Localhost, file)) // of its own (cri-o#6498)
			c.Says(t, "EPERM\n")
		})
	}
	for name, change := range map[string]scene.PodChange{
		"old, missing": sandbox("localhost/"+missing, nil),
		"new, missing": sandbox("", &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: missing}),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.TryPod(t, "crun", change)
			scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition}, missing)
		})
	}
}

// What a profile forbids may be a call that the runtime makes itself, once it has loaded the filter: it dies, or says
// something that names neither the filter nor the profile.
func TestSeccompProfilesThatStopTheRuntime_syscall2seccomp_1_kubernetes_website_45460(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	dir := w.Dir(t)
	profiles := map[string]string{}
	for name, text := range map[string]string{
		"nothing":      `{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["exit_group"], "action": "SCMP_ACT_ALLOW"}]}`,
		"kills":        `{"defaultAction": "SCMP_ACT_KILL_PROCESS", "syscalls": [{"names": ["exit_group"], "action": "SCMP_ACT_ALLOW"}]}`,
		"capabilities": `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["capset", "prctl"], "action": "SCMP_ACT_ERRNO"}]}`,
	} {
		profiles[name] = filepath.Join(dir, name+".json")
		scene.Write(t, profiles[name], text)
	}
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for name, file := range profiles {
			t.Run(name, func(t *testing.T) {
				c, err := p.Try(t.Context(), "sleep", profiled(newForm, cri.SecurityProfile_Localhost, file))
				if err == nil {
					err = c.TryStart(t.Context())
				}
				if err == nil || !strings.Contains(err.Error(), "its seccomp profile "+file+" may forbid") {
					t.Errorf("create and start: %v", err)
				}
			})
		}
	})
}

// A container that its profile keeps from its program, or from its end, can be stopped and removed all the same; one that
// is killed says why.
func TestSeccompProfilesThatTrapTheContainer_kubernetes_85191_moby_36830_crio_5720(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	dir := w.Dir(t)
	profile := func(t *testing.T, calls, action string) (string, scene.ContainerChange) {
		t.Helper()
		file := filepath.Join(dir, strings.ReplaceAll(t.Name(), "/", "-"))
		scene.Write(t, file, `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": [`+calls+`], "action": "`+action+`"}]}`)
		return file, profiled(newForm, cri.SecurityProfile_Localhost, file)
	}
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		t.Run("no end", func(t *testing.T) {
			_, change := profile(t, `"exit_group", "exit"`, "SCMP_ACT_ERRNO")
			c := p.Start(t, "echo runs", change)
			c.Says(t, "runs")
			c.Stop(t, 1)
			scene.Equal(t, "exit code", c.Wait(t).ExitCode, 137)
			c.Remove(t)
		})
		t.Run("no program", func(t *testing.T) {
			_, change := profile(t, `"execve"`, "SCMP_ACT_KILL")
			c := p.Start(t, "echo runs", change)
			c.Stop(t, 1)
			c.Wait(t)
			c.Remove(t)
		})
		t.Run("killed", func(t *testing.T) {
			file, change := profile(t, `"mkdir", "mkdirat"`, "SCMP_ACT_KILL_PROCESS")
			s := p.Start(t, "try mkdir", change).Wait(t)
			scene.Equal(t, "exit code", s.ExitCode, 159)
			if !strings.HasPrefix(s.Message, "killed by SIGSYS: the seccomp profile "+file+" forbids") {
				t.Errorf("the status says %q", s.Message)
			}
		})
	})
}

// Debian's runc 1.1 refuses any flag, and later ones those that their libseccomp lacks.
func TestSeccompFlags_runc_2430_moby_42619(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	file := filepath.Join(w.Dir(t), "flags.json")
	scene.Write(t, file, strings.Replace(noMkdir, "{", `{"flags": ["SECCOMP_FILTER_FLAG_TSYNC", "SECCOMP_FILTER_FLAG_SPEC_ALLOW"], `, 1))
	scene.Each(t, func(t *testing.T, handler string) {
		out := w.Pod(t, handler).Finish(t, "try mkdir", profiled(newForm, cri.SecurityProfile_Localhost, file))
		scene.Equal(t, "mkdir", out, "EPERM\n")
	})
}
